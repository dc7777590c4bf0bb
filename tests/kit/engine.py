"""Run the whole engine in this process, like the server."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar, cast

import tiktoken

from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.chat.request import ChatRequest, parse
from proxy.limits.profiles import Profile
from proxy.pipeline.budget import rules_for
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import CompactionInput, Outcome
from proxy.store import Entry, Store
from proxy.store.archive import Archive
from proxy.summary.forms import SummaryForm
from proxy.summary.model import UpstreamSummaryModel
from proxy.summary.quality import Written
from proxy.summary.single_flight import NothingToAsk, Summaries
from proxy.summary.writer import SummaryModels
from proxy.summary.writers import TranscriptWriter
from tests.kit.generator import MODEL, Setting, body_of

NOTES = "The build was repaired; two tests still fail."
"""The summary model's text. It doesn't depend on its input."""

T = TypeVar("T")
Ask = Callable[[str], str]
"""From the material to a summary. Raises ``SummaryFailed``."""


def constant(material: str) -> str:
    return NOTES


class _Encoding:
    """The real one; short texts (ids, names, lines of an index) come again and again."""

    def __init__(self, real: tiktoken.Encoding) -> None:
        self._real = real
        self._core_bpe = real._core_bpe
        self._short = lru_cache(maxsize=50_000)(real.encode)

    def encode(self, text: str, *, disallowed_special: tuple[str, ...]) -> list[int]:
        """See ``tiktoken.Encoding``."""
        encode = self._short if len(text) < 2_000 else self._real.encode
        return encode(text, disallowed_special=disallowed_special)

    def encode_ordinary(self, text: str) -> list[int]:
        """See ``tiktoken.Encoding``."""
        return self._short(text, disallowed_special=())


class _Counter(ChatCounter):
    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        return cast("tiktoken.Encoding", _Encoding(super()._encoding))


COUNTER = _Counter(Profile(MODEL, tokenizer="o200k_base"))


class Plain(Store):
    """A store in a dictionary: tens of thousands of conversations need no thread."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str, str], bytes] = {}

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        """See ``Store``."""
        return {key: self.entries[tenant, kind, key] for key in keys if (tenant, kind, key) in self.entries}

    async def put_many(self, entries: Sequence[Entry]) -> None:
        """See ``Store``."""
        self.entries |= {(entry.tenant, entry.kind, entry.key): entry.value for entry in entries}

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        """See ``Store``."""
        return self.entries.setdefault((tenant, kind, key), value)

    async def replace(self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        """See ``Store``."""
        if self.entries.get((tenant, kind, key)) != old:
            return False
        if seconds:
            self.entries[tenant, kind, key] = new
        else:
            del self.entries[tenant, kind, key]
        return True

    async def aclose(self) -> None:
        """See ``Store``."""


class _Model:
    """A summary model that is a function."""

    input_limit = None
    count = staticmethod(COUNTER.text)

    def __init__(self, name: str, ask: Ask) -> None:
        self.name = name
        self._ask = ask

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        """See ``UpstreamSummaryModel``."""
        return Written(self._ask(messages[-1]["content"]), "stop")


class _Models(SummaryModels):
    """One model for all summaries."""

    def __init__(self, model: _Model) -> None:
        self._model = model

    async def for_transcript(self, max_tokens: int, form: SummaryForm | None = None) -> Sequence[UpstreamSummaryModel]:
        """See ``SummaryModels``."""
        return cast("Sequence[UpstreamSummaryModel]", (self._model,))


@dataclass(frozen=True)
class Request:
    """A request as it comes."""

    body: ChatRequest
    setting: Setting
    budget: int
    tenant: str

    @property
    def messages(self) -> list[bytes]:
        """As the proxy reads them: in a body with lone surrogates these are replaced."""
        return [bytes(raw) for raw in self.body.units]

    def printed(self) -> str:
        return json.dumps(
            {
                "setting": self.setting.name,
                "budget": self.budget,
                "messages": [json.loads(raw) for raw in self.messages],
            }
        )


def request(raws: Sequence[bytes], setting: Setting, budget: int, *, tenant: str = "t", model: str = MODEL) -> Request:
    return Request(parse(body_of(raws, model)), setting, budget, tenant)


class Engine:
    """One process of the server. ``asked`` counts the calls of the summary model."""

    def __init__(self, remembered: FactsCache, store: Store | None = None) -> None:
        self.store: Store = Plain() if store is None else store
        self.archive = Archive(self.store)
        self.asked = 0
        self._summaries = Summaries(self.store)
        self.compactor = Compactor(remembered, self._summaries, self.archive)

    def case(self, request: Request, ask: Ask = constant) -> CompactionInput:
        def counted(material: str) -> str:
            self.asked += 1
            return ask(material)

        models = _Models(_Model(f"summaries of {request.body.model}", counted))
        return CompactionInput(
            body=request.body,
            counter=COUNTER,
            policy=request.setting.policy,
            mode="enforce",
            budget=request.budget,
            tenant=request.tenant,
            upstream="u",
            writers=(TranscriptWriter(models),),
            rules=rules_for(request.setting.policy, window_known=True),
            strict=request.setting.strict,
        )

    async def send(self, request: Request, ask: Ask = constant) -> Outcome:
        """Return the sent request. Summaries in the background are finished by then."""
        case = self.case(request, ask)
        outcome = self.compactor.untouched(case) or await self.compactor.compact(case)
        await settled()
        return outcome

    async def aclose(self) -> None:
        await self._summaries.aclose()
        await self.archive.aclose()
        await self.store.aclose()


async def settled() -> None:
    """Wait until the background tasks have ended. Raises the error of a task that failed.

    A cancelled task isn't a failure: the service cancels the renewal of a lease when it releases the lease. A task
    ahead of need may have no model to ask.
    """
    while others := asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}:
        ended, _ = await asyncio.wait(others)
        for task in ended:
            if not task.cancelled() and not isinstance(task.exception(), NothingToAsk):
                task.result()


def sent(request: Request, outcome: Outcome) -> list[bytes]:
    return request.messages if outcome.messages is None else [bytes(raw) for raw in outcome.messages]


class _Inline(asyncio.SelectorEventLoop):
    """A loop that does at once what others give to a thread: cheaper, and in the same order at every run."""

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  the code that awaits the future gets it, as with a thread
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    with runner() as loop:
        return loop.run(main)


def runner() -> asyncio.Runner:
    """Return a function that runs coroutines one after the other in one loop, without threads."""
    return asyncio.Runner(loop_factory=_Inline)
