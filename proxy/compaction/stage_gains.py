"""The tokens and bytes that the cheap stages save on a body."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.gains import Gains, LateGains, PlainGains
from proxy.compaction.sizes import Sizes
from proxy.compaction.stages.stage import Stage
from proxy.compaction.turn import Turn


def stage_gains(
    stages: Sequence[Stage], body: Sequence[Turn], sizes: Sizes, pinned: frozenset[int]
) -> tuple[dict[str, Gains], dict[str, list[int]]]:
    """Return the tokens that each stage saves; and the bytes by group, for stages that look at one message only.

    A stage that waits for a later message counts only the tokens that it saves beyond all other stages. The
    conversation is then never larger than estimated, whichever stages are applied. Messages that arrive afterwards
    don't change the estimate.
    """
    plain = [stage for stage in stages if not stage.later()]
    gains: dict[str, Gains] = {}
    lighter: dict[str, list[int]] = {}
    least = [sizes.clips.get(index, turn.facts.tokens) for index, turn in enumerate(body)]
    for stage in plain:
        by_group = [0] * len(sizes)
        bytes_by_group = lighter[stage.name] = [0] * len(sizes)
        for group, (start, end) in enumerate(zip(sizes.starts, sizes.ends, strict=True)):
            for index in range(start, end):
                turn = body[index]
                form = stage.reduce(index, turn)
                if form is None or index in pinned:
                    continue
                # The limit of an oversized result already saves some of these tokens.
                held = turn.facts.tokens - sizes.clips.get(index, turn.facts.tokens)
                gain = max(0, turn.facts.tokens - form.facts.tokens - held)
                by_group[group] += gain
                least[index] -= gain
                if gain:
                    bytes_by_group[group] += len(turn.raw) - len(form.raw)
        gains[stage.name] = PlainGains(by_group)
    for stage in stages:
        if stage.name in gains:
            continue
        late: dict[tuple[int, int], int] = {}
        for index, later in stage.later().items():
            form = stage.reduce(index, body[index])
            if form is not None and index not in pinned and form.facts.tokens < least[index]:
                pair = sizes.group_of(index), sizes.group_of(later)
                late[pair] = late.get(pair, 0) + least[index] - form.facts.tokens
        gains[stage.name] = LateGains(len(sizes), late)
    return gains, lighter
