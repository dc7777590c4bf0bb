"""A way to have summaries written: its interface and its task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from proxy.compaction.format import Format
from proxy.compaction.turn import OutgoingMessage, Turn
from proxy.config.policy import SummarySettings
from proxy.dialects.request import Request
from proxy.summary.forms import SummaryForm
from proxy.summary.model import UpstreamSummaryModel
from proxy.summary.prompt import Redaction
from proxy.summary.quality import SummaryUnasked


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryTask:
    """A summary to write, of at most ``max_tokens`` by the conversation's tokenizer.

    ``turns`` are the messages since the summary ``previous``. ``settings`` are those of the policy. ``redact`` removes
    text that no model may read in a transcript.

    ``body`` is the client's request, if the writer needs it, and ``fixed`` the tokens of its tools and framing.
    ``last_prompt`` returns the last prompt up to the checkpoint, see ``pipeline.job``, and ``whole_prompt`` all
    messages up to it. Call them with ``in_thread``, which runs slow work.
    """

    turns: Sequence[Turn]
    format: Format
    previous: str | None
    max_tokens: int
    settings: SummarySettings
    redact: Redaction | None = None
    body: Request | None = None
    fixed: int = 0
    last_prompt: Callable[[], Sequence[OutgoingMessage] | None] = lambda: None
    whole_prompt: Callable[[], Sequence[OutgoingMessage] | None] = lambda: None
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None


class SummaryTry(NamedTuple):
    """One try to write a summary: the name of its circuit breaker, and what returns the text.

    ``write`` raises ``SummaryFailed`` or ``SummaryRejected``. With ``after_refusal``, the try is made only if another
    one raised ``SummaryRefused``.
    """

    breaker: tuple[str, ...]
    write: Callable[[], Awaitable[str]]
    after_refusal: bool = False


class SummaryModels(ABC):
    """The models that may write the summaries of one conversation.

    ``may_continue`` is false if ``for_continuation`` raises ``SummaryUnasked`` for each task. ``own`` names the
    conversation's own model.
    """

    may_continue: bool = False
    own: str = ""

    @abstractmethod
    async def for_transcript(self, max_tokens: int, form: SummaryForm | None = None) -> Sequence[UpstreamSummaryModel]:
        """Return the models that may read a transcript, in the order to try them.

        ``max_tokens`` is the maximum size of the summary, which their windows reserve. ``form`` is that of a service
        which has none of the APIs.
        """

    async def for_continuation(self, max_tokens: int) -> UpstreamSummaryModel:
        """Return the conversation's own model, to continue the conversation with it.

        Raises ``SummaryUnasked``, or ``ConfigurationError`` if its upstream can't be used.
        """
        raise SummaryUnasked("the conversation can't be continued")

    @property
    def refuses_transcripts(self) -> bool:
        """Return whether the conversation's upstream was found to refuse transcripts, but not the conversation."""
        return False

    def refused_transcript(self) -> None:  # noqa: B027 - models of tests have no memory
        """Remember that the conversation's upstream refused a transcript, and then wrote notes."""

    def with_tool(self, body: bytes) -> bytes:
        """Return a body with the proxy's own tool, if the conversation's requests get it."""
        return body

    @property
    def any_for_transcript(self) -> bool:
        """Return false if ``for_transcript`` will return none."""
        return True

    def keep_conditions(self, body: Request) -> None:  # noqa: B027 - models of tests have none
        """Read from the client's request what the calls need, before the request drops its bytes."""


class SummaryWriter(ABC):
    """A way to have summaries written, for one conversation. ``WRITERS`` in ``pipeline.summary_models`` lists them."""

    def __init__(self, models: SummaryModels) -> None:
        self.models = models

    @property
    def available(self) -> bool:
        """Return false if ``tries`` will return none, whatever the task is."""
        return True

    @property
    def needs_body(self) -> bool:
        """Return whether the tries send the client's own request."""
        return False

    @abstractmethod
    async def tries(self, task: SummaryTask) -> Sequence[SummaryTry]:
        """Return the tries to make, in order; none if this writer can't do it."""
