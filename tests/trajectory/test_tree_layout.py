"""Tree packing against path packing: the same targets and weights, each shared token once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from gyre.ledger.microsteps import MicroStep
from gyre.trajectory.blocks import blocks_of
from gyre.trajectory.layout import lay_out
from gyre.trajectory.samples import Sample, select_execution
from gyre.trajectory.steps import ConsumedGroup, Flush, build_step

from .trees import attempts, groups, settings, turn, whole_sequences


def seen(microstep: MicroStep, row: int) -> list[int]:
    """The rows that a row sees, itself last, by the meaning of segments and parents: naive."""
    rows = []
    segment = int(microstep.segments[row])
    while segment >= 0:
        mine = np.flatnonzero(microstep.segments == segment)
        rows += [int(each) for each in mine[mine <= row][::-1]]
        segment = int(microstep.parents[segment]) if len(microstep.parents) else -1
    return rows[::-1]


def contents(microsteps: list[MicroStep]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """For each target, by its provenance: everything that its loss depends on, the whole context included."""
    found = {}
    for each in microsteps:
        for i in range(each.targets):
            sample = int(each.target_samples[i])
            rows = seen(each, int(each.target_rows[i]))
            assert each.positions[rows].tolist() == list(range(len(rows)))
            owner = (each.executions[sample], int(each.attempts[sample]))
            mates = np.flatnonzero(each.target_samples == sample)
            key = (*owner, int(each.target_turns[i]), int(each.target_offsets[i]))
            assert key not in found
            found[key] = (
                tuple(each.tokens[rows].tolist()),
                int(each.target_tokens[i]),
                float(each.behaviour_logprobs[i]),
                int(each.target_versions[i]),
                int(each.target_lineages[i]),
                float(each.advantages[sample]),
                float(each.weights[sample]),
                float(each.temperatures[sample]),
                int(each.dispatch_versions[sample]),
                frozenset((int(each.target_turns[m]), int(each.target_offsets[m])) for m in mates),
            )
    return found


CHOSEN = st.fixed_dictionaries(
    {"max_paths": st.sampled_from((1, 2, 3, 9)), "tokens_per_microstep": st.sampled_from((6, 20, 60, 1000))}
)


@given(st.lists(groups("g00000") | groups("g00001"), max_size=2, unique_by=lambda group: group.group), CHOSEN)
def test_the_targets_of_trees_are_those_of_paths(journal: list[ConsumedGroup | Flush], chosen: dict[str, Any]) -> None:
    paths, account = build_step(settings(**chosen), 3, journal)
    trees, same = build_step(settings(**chosen, packing="tree"), 3, journal)
    assert contents(trees) == contents(paths)
    for each in trees:
        assert len(each.tokens) <= chosen["tokens_per_microstep"]
    assert (account.sampled, account.trained, account.dropped) == (same.sampled, same.trained, same.dropped)
    assert same.trained == sum(each.targets for each in trees) == same.sampled - sum(same.dropped.values())
    assert sum(len(each.tokens) for each in trees) <= sum(len(each.tokens) for each in paths)


@given(attempts(), st.integers(1, 6), st.integers(5, 60))
def test_a_tree_has_each_token_of_its_paths_once(turns: list[Any], max_paths: int, bound: int) -> None:
    samples = selected(turns, max_paths=max_paths, tokens_per_microstep=bound)
    whole = whole_sequences(turns)
    unique = {place for sample in samples for place in whole[sample.tip][: len(sample.tokens)]}
    blocks = blocks_of(samples, "tree", bound)
    assert sorted(s.tip for block in blocks for s in block.samples) == sorted(s.tip for s in samples)
    for block in blocks:
        mine = {place for sample in block.samples for place in whole[sample.tip][: len(sample.tokens)]}
        assert len(lay_out(1, [block]).tokens) == block.tokens == len(mine) <= bound
    if len(unique) <= bound:
        assert [block.tokens for block in blocks] == ([len(unique)] if samples else [])


@given(attempts(), st.integers(1, 6))
def test_segments_are_in_preorder_and_end_only_at_forks(turns: list[Any], max_paths: int) -> None:
    samples = selected(turns, max_paths=max_paths, tokens_per_microstep=1000)
    if not samples:
        return
    each = lay_out(1, blocks_of(samples, "tree", 1000))
    assert np.all(np.diff(each.segments) >= 0) and np.all(np.diff(each.segments) <= 1)
    parents, path = each.parents.tolist(), []
    children: dict[int, int] = defaultdict(int)
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        assert parent == -1 or path
        path.append(segment)
        children[parent] += 1
    ends = {int(seen(each, row)[-1]) for row in each.target_rows}
    for segment in range(len(parents)):
        if children[segment] == 1:  # two paths, one of which ends here
            last = int(np.flatnonzero(each.segments == segment)[-1])
            assert last - 1 in ends


def selected(turns: list[Any], **chosen: Any) -> list[Sample]:
    samples, _ = select_execution(
        turns, settings(**chosen), execution="g0-0", attempt=0, advantage=1.0, dispatch_version=0
    )
    return samples


FORKED = [
    turn(0, context=[1, 2, 3], output=[4, 5]),
    turn(1, 0, 5, context=[6], output=[7, 8]),
    turn(2, 0, 3, output=[9]),
    turn(3, 1, 7, context=[10], output=[11]),
]


def test_rows_of_a_tree_by_hand() -> None:
    (block,) = blocks_of(selected(FORKED), "tree", 64)
    each = lay_out(4, [block])
    # 0: 1 2 3 | 4 5 6 7 | 8; 3 forks off behind 7, 2 behind 3
    assert [s.tip for s in block.samples] == [2, 3, 1]
    assert each.tokens.tolist() == [1, 2, 3, 9, 4, 5, 6, 7, 10, 11, 8]
    assert each.positions.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 7]
    assert each.segments.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4]
    assert each.parents.tolist() == [-1, 0, 0, 2, 2]
    assert {int(each.target_tokens[i]): int(each.target_rows[i]) for i in range(each.targets)} == {
        9: 2,
        4: 2,
        5: 4,
        7: 6,
        11: 8,
        8: 7,
    }
    for name in ("tokens", "positions", "segments", "target_rows", "parents"):
        assert getattr(each, name).dtype == np.int32, name


def test_a_tree_over_the_bound_is_cut_between_neighbouring_paths() -> None:
    samples = selected(FORKED, tokens_per_microstep=10)
    blocks = blocks_of(samples, "tree", 10)
    assert [[s.tip for s in block.samples] for block in blocks] == [[2, 3], [1]]
    assert [block.tokens for block in blocks] == [10, 8]
    assert [block.shared for block in blocks] == [[0, 3], [0]]


def test_paths_that_share_nothing_are_laid_out_as_paths() -> None:
    turns = [turn(0, context=[1], output=[2]), turn(1, context=[3], output=[4, 5])]
    samples = sorted(selected(turns), key=lambda sample: sample.path)
    as_tree = lay_out(1, blocks_of(samples, "tree", 64))
    assert len(as_tree.parents) == 0
    assert as_tree.segments.tolist() == [0, 0, 1, 1, 1]
