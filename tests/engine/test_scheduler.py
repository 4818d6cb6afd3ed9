"""The scheduler and its blocks: nothing is owned twice, nothing is lost, nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from groupwise.engine.scheduler import BlockPool, Scheduler
from groupwise.records import Completion, Request

Lengths = dict[tuple[int, int], int]


def request(prompt: int, members: int) -> Request:
    return Request(prompt=tuple(range(prompt)), seeds=tuple(range(members)))


def token(request: int, member: int, position: int) -> int:
    """What a sequence writes, the same each time it starts over."""
    return 1000 * request + 100 * member + position


def step(scheduler: Scheduler, lengths: Lengths) -> dict[tuple[int, int], Completion]:
    """Do what the engine does in one step, with tokens that need no model; return who finished."""
    scheduler.make_room()
    check(scheduler)
    for sequence in scheduler.running:
        # The key of the last token goes to the place before the end of the room.
        assert scheduler.length[sequence.slot] <= scheduler.room[sequence.slot]
    scheduler.admit()
    check(scheduler)
    finished = {}
    for sequence in list(scheduler.running):
        who, slot = (sequence.request, sequence.member), sequence.slot
        scheduler.tokens[slot, scheduler.length[slot]] = token(*who, int(scheduler.length[slot]))
        scheduler.length[slot] += 1
        if scheduler.length[slot] == lengths[who]:
            finished[who] = scheduler.finish(sequence, "end")
    check(scheduler)
    return finished


def check(scheduler: Scheduler) -> None:
    """Everything that holds between any two moves of the scheduler."""
    running, pool = scheduler.running, scheduler.pool
    assert [(s.request, s.member) for s in running] == sorted((s.request, s.member) for s in running)
    slots = [s.slot for s in running]
    assert len(set(slots)) == len(slots) <= len(scheduler.length)
    assert all(s.slot == -1 and not s.blocks for s in scheduler.waiting)
    users = Counter(s.prefix for s in running)
    for sequence in [*running, *scheduler.waiting]:
        prefix = sequence.prefix
        assert prefix.users == users[prefix]
        assert len(prefix.blocks) == (pool.blocks_for(len(prefix.tokens)) if prefix.users else 0)
    owned = [b for s in running for b in s.blocks] + [b for prefix in users for b in prefix.blocks]
    assert len(set(owned)) == len(owned)
    assert len(owned) + pool.free == pool.count
    for s in running:
        assert scheduler.tables[s.slot, : len(s.blocks)].tolist() == s.blocks
        assert scheduler.prompt_tables[s.request, : len(s.prefix.blocks)].tolist() == s.prefix.blocks
        assert scheduler.room[s.slot] == len(s.blocks) * pool.block_size


def scheduler_for(
    requests: list[Request], *, slots: int, blocks: int, max_tokens: int, size: int = 4
) -> Scheduler:
    pool = BlockPool(blocks, block_size=size)
    return Scheduler(requests, slots=slots, pool=pool, max_tokens=max_tokens)


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_lose_nothing_share_nothing_and_end(seed):
    rng = random.Random(seed)
    size, max_tokens = rng.randint(1, 6), rng.randint(1, 20)
    requests = [request(rng.randint(1, 15), rng.randint(1, 5)) for _ in range(rng.randint(1, 6))]
    lengths = {
        (r, m): rng.randint(1, max_tokens) for r, q in enumerate(requests) for m in range(len(q.seeds))
    }
    least = -(-max(len(q.prompt) for q in requests) // size) - (-max_tokens // size)
    pool = BlockPool(least + rng.randint(0, 8), block_size=size)
    scheduler = Scheduler(requests, slots=rng.randint(1, 8), pool=pool, max_tokens=max_tokens)

    finished: dict[tuple[int, int], Completion] = {}
    for _ in range(sum(lengths.values())):  # the oldest gets on in every step: more are never needed
        finished |= step(scheduler, lengths)
    assert not scheduler.running
    assert not scheduler.waiting
    assert pool.free == pool.count
    assert {who: c.tokens for who, c in finished.items()} == {
        (r, m): tuple(token(r, m, t) for t in range(length)) for (r, m), length in lengths.items()
    }


def test_a_cache_too_small_for_all_still_serves_all():
    scheduler = scheduler_for([request(4, 3)], slots=3, blocks=5, max_tokens=12)
    finished = {}
    while scheduler.waiting or scheduler.running:
        finished |= step(scheduler, {(0, m): 12 for m in range(3)})
    assert scheduler.preempted > 0
    assert len(finished) == 3


def test_the_newest_is_preempted_first_and_is_next_in_line():
    scheduler = scheduler_for([request(4, 3)], slots=3, blocks=4, max_tokens=8)
    lengths = {(0, m): 8 for m in range(3)}
    for _ in range(5):  # the first block holds the keys of four, and the fifth's is not stored yet
        step(scheduler, lengths)
    assert [s.member for s in scheduler.running] == [0, 1, 2]
    step(scheduler, lengths)
    # Member 0 needed a block and took member 2's; then member 1 needed one and there was only its own.
    assert [s.member for s in scheduler.running] == [0]
    assert [s.member for s in scheduler.waiting] == [1, 2]
    assert scheduler.preempted == 2


def test_after_a_preemption_nobody_starts_until_somebody_finishes():
    scheduler = scheduler_for([request(4, 2)], slots=2, blocks=4, max_tokens=12)
    lengths = {(0, 0): 12, (0, 1): 12}
    while not scheduler.preempted:
        step(scheduler, lengths)
    while not step(scheduler, lengths):
        assert [s.member for s in scheduler.running] == [0]
    assert [s.member for s in scheduler.waiting] == [1]
    step(scheduler, lengths)
    assert [s.member for s in scheduler.running] == [1]


def test_a_finished_sequence_makes_place_for_the_next_in_the_following_step():
    scheduler = scheduler_for([request(3, 4)], slots=2, blocks=20, max_tokens=5)
    lengths = {(0, 0): 1, (0, 1): 3, (0, 2): 2, (0, 3): 2}
    running = []
    while scheduler.waiting or scheduler.running:
        step(scheduler, lengths)
        running.append([s.member for s in scheduler.running])
    assert running == [[1], [1, 2], [], [3], []]


def test_a_group_shares_its_prompt_blocks_until_the_last_member_is_gone():
    scheduler = scheduler_for([request(9, 2)], slots=2, blocks=10, max_tokens=4)
    scheduler.admit()
    first, last = scheduler.running
    assert first.prefix is last.prefix
    assert len(first.prefix.blocks) == 3  # nine tokens in blocks of four
    assert scheduler.pool.free == 10 - 3 - 2
    scheduler.finish(first, "end")
    assert len(last.prefix.blocks) == 3
    scheduler.finish(last, "end")
    assert last.prefix.blocks == []
    assert scheduler.pool.free == 10


def test_a_block_more_is_taken_only_when_the_last_one_is_full():
    scheduler = scheduler_for([request(1, 1)], slots=1, blocks=9, max_tokens=9)
    held = []
    for _ in range(8):
        step(scheduler, {(0, 0): 9})
        held.append(len(scheduler.running[0].blocks))
    # The fifth token's key is stored in the step that draws the sixth.
    assert held == [1, 1, 1, 1, 1, 2, 2, 2]


def test_equal_runs_get_equal_blocks():
    def blocks() -> list[list[int]]:
        scheduler = scheduler_for([request(5, 3), request(2, 3)], slots=4, blocks=12, max_tokens=8)
        seen = []
        while scheduler.waiting or scheduler.running:
            step(scheduler, {(r, m): 2 + r + 2 * m for r in range(2) for m in range(3)})
            seen.append([b for s in scheduler.running for b in s.blocks])
        return seen

    assert blocks() == blocks()


def test_a_block_given_back_twice_is_noticed():
    pool = BlockPool(2, block_size=4)
    taken = pool.take(1)
    pool.give_back(taken)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(taken)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_tokens_are_counted_in_whole_blocks(tokens, blocks):
    assert BlockPool(1, block_size=4).blocks_for(tokens) == blocks
