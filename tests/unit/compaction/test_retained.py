"""Test which messages are kept with a summary."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.sizes import RetainedGroups
from proxy.compaction.turn import Facts, Turn
from proxy.dialects.chat.units import KINDS


def of(*sizes: tuple[str, int, bytes]) -> list[list[Turn]]:
    return [[Turn(b"{}", Facts(KINDS.get(role, ""), role, tokens, digest))] for role, tokens, digest in sizes]


def retained(groups: list[list[Turn]], most: int | None, newest: int | None = None) -> RetainedGroups:
    made = RetainedGroups(most, newest)
    for group, members in enumerate(groups):
        if members[0].facts.role == "user":
            made.skip()
        else:
            made.add(group, members, members[0].facts.tokens, pinned=members[0].facts.role == "pinned")
    return made


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("system", "user", "pinned")), st.integers(1, 50), st.sampled_from((b"a", b"b", b"c"))
        )
    ),
    st.integers(1, 120),
)
def test_each_cut_depends_on_what_comes_before_it_alone(drawn: list[tuple[str, int, bytes]], most: int) -> None:
    groups = of(*drawn)
    whole = retained(groups, most)
    sizes = [members[0].facts.tokens for members in groups]
    assert whole.totals(sizes) == whole.tokens
    for cut in range(len(groups) + 1):
        assert retained(groups[:cut], most).groups(cut) == whole.groups(cut)
        system = [group for group in whole.groups(cut) if drawn[group][0] == "system"]
        assert sum(sizes[group] for group in system) <= most or len(system) == 1
        newest = [group for group in range(cut) if drawn[group][0] == "system"][-1:]
        assert system[-1:] == newest
