"""GrammarCache: what goes when there are too many, when they are too large, and when nobody uses them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hamburger.engine.grammar.cache import FRESH_SECONDS, MAX_BYTES, MAX_GRAMMARS, MAX_USES, GrammarCache


class Clock:
    """A second later each time that it is asked."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_the_least_recently_used_go_when_there_are_too_many() -> None:
    cache = GrammarCache[int](Clock())
    for i in range(MAX_GRAMMARS):
        cache.put(str(i), i, 1)
    assert cache.get("0") == 0
    cache.put("more", -1, 1)
    assert cache.get("1") is None
    assert (cache.get("0"), cache.get("more"), cache.num_bytes) == (0, -1, MAX_GRAMMARS)


def test_large_ones_drive_out_others() -> None:
    clock = Clock()
    cache = GrammarCache[int](clock)
    cache.put("a", 1, MAX_BYTES // 2)
    clock.now += FRESH_SECONDS
    cache.put("b", 2, MAX_BYTES // 2)
    clock.now += FRESH_SECONDS
    cache.put("c", 3, 1)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (None, 2, 3)
    clock.now += FRESH_SECONDS
    cache.put("huge", 4, 9 * MAX_BYTES)
    assert (cache.get("b"), cache.get("c"), cache.get("huge")) == (None, None, 4)
    clock.now += FRESH_SECONDS
    cache.put("d", 5, 1)
    assert (cache.get("huge"), cache.get("d"), cache.num_bytes) == (None, 5, 1)


def test_what_was_used_a_moment_ago_stays() -> None:
    cache = GrammarCache[int](lambda: 1.0)
    for i in range(2 * MAX_GRAMMARS):
        cache.put(str(i), i, MAX_BYTES)
    assert cache.get("0") == 0


def test_one_that_was_used_often_is_made_anew() -> None:
    cache = GrammarCache[int]()
    cache.put("a", 1, 7)
    for _ in range(MAX_USES - 1):
        cache.count_use("a")
    assert cache.get("a") == 1
    cache.count_use("a")
    assert cache.get("a") is None
    cache.put("a", 2, 8)
    assert (cache.get("a"), cache.num_bytes) == (2, 8)


def test_what_nobody_uses_is_forgotten() -> None:
    now = [0.0]
    cache = GrammarCache[int](lambda: now[0])
    cache.put("a", 1, 5)
    cache.put("b", 2, 6)
    now[0] = 50
    assert cache.get("b") == 2
    now[0] = 60
    cache.forget_unused(60)
    assert (cache.get("a"), cache.get("b"), cache.num_bytes) == (None, 2, 6)
    cache.forget("b")
    cache.forget("b")
    assert cache.num_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, MAX_BYTES), st.sampled_from(["put", "forget"]))))
def test_the_bytes_are_those_of_what_is_held(lives: list[tuple[str, int, str]]) -> None:
    now = [0.0]
    cache, held = GrammarCache[int](lambda: now[0]), dict[str, int]()
    for name, size, deed in lives:
        now[0] += 2 * FRESH_SECONDS
        if deed == "put":
            cache.put(name, size, size)
            held[name] = size
        else:
            cache.forget(name)
        held = {name: size for name, size in held.items() if cache.get(name) is not None}
        assert cache.num_bytes == sum(held.values())
        assert cache.num_bytes <= MAX_BYTES or len(held) == 1
