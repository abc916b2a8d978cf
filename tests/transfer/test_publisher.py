"""The publisher's retention rules, as a property, against a session that keeps real shapes and real memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gyre.transfer.errors import Misuse
from gyre.transfer.manifest import Peer, digest_of
from gyre.transfer.publish import BufferKey, Publisher

SIZES = (0, 1, 24, 4096)


class FakeRegion:
    def __init__(self, nbytes: int) -> None:
        self.memory = np.full(nbytes, 255, np.uint8)
        self.address, self.nbytes, self.closed = int(self.memory.ctypes.data), nbytes, False

    def array(self) -> np.ndarray:
        assert not self.closed, "a closed region was used"
        return self.memory

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


class FakeSession:
    """Registers by keeping a list; `regions` are all that were ever made, none is freed behind the test's back."""

    def __init__(self) -> None:
        self.peer = Peer("10.0.0.1:12000", "a", 12001)
        self.regions: list[FakeRegion] = []

    def allocate(self, nbytes: int) -> FakeRegion:
        self.regions.append(FakeRegion(nbytes))
        return self.regions[-1]

    def open_regions(self) -> int:
        return sum(not region.closed for region in self.regions)


keys = st.builds(
    BufferKey,
    st.sampled_from(["weights", "gradients"]),
    st.integers(1, 2),
    st.integers(0, 3),
    st.integers(0, 1),
)
publications = st.tuples(st.just("publish"), keys, st.sampled_from(SIZES), st.integers(0, 254))
retirements = st.tuples(st.just("retire"), st.frozensets(keys, max_size=12))


@given(st.lists(publications | retirements, max_size=40), st.integers(0, 2))
@settings(deadline=None, max_examples=150)
def test_what_is_kept_never_changes(actions, spares):
    session = FakeSession()
    publisher = Publisher(session, 0, spares=spares)
    expected: dict[BufferKey, bytes] = {}
    descriptors = {}
    for action in actions:
        if action[0] == "publish":
            _, key, nbytes, fill = action
            source = np.full(nbytes, fill, np.uint8)
            if key in expected:
                with pytest.raises(Misuse):
                    publisher.publish(key, source)
            else:
                descriptors[key] = publisher.publish(key, source)
                expected[key] = source.tobytes()
                source[:] = 255  # the publisher holds a copy
        else:
            gone = [key for key in expected if key not in action[1]]
            assert publisher.retire(action[1]) == gone
            for key in gone:
                del expected[key], descriptors[key]
        assert publisher.published() == descriptors
        for key, content in expected.items():
            assert publisher.array(key).tobytes() == content
            assert descriptors[key].digest == digest_of(content)
            assert descriptors[key].nbytes == len(content)
        places = sorted((d.address, d.nbytes) for d in descriptors.values() if d.nbytes)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))
        assert len(expected) <= session.open_regions() <= len(expected) + spares


def test_spare_region_of_equal_size_is_reused():
    session = FakeSession()
    publisher = Publisher(session, 0, spares=1)
    steps = [BufferKey("weights", 1, step) for step in range(4)]
    first = publisher.publish(steps[0], bytes(100))
    publisher.publish(steps[1], bytes(100))
    assert publisher.retire(keep=[steps[1]]) == [steps[0]]
    assert publisher.publish(steps[2], bytes([1]) * 100).address == first.address
    publisher.publish(steps[3], bytes(50))
    assert [region.nbytes for region in session.regions] == [100, 100, 50]


def test_published_view_cannot_be_written():
    publisher = Publisher(FakeSession(), 0)
    key = BufferKey("weights", 1, 1)
    publisher.publish(key, b"abc")
    with pytest.raises(ValueError, match="read-only"):
        publisher.array(key)[0] = 1


def test_refused_buffers():
    publisher = Publisher(FakeSession(), 0)
    key = BufferKey("weights", 1, 1)
    with pytest.raises(ValueError, match="contiguous"):
        publisher.publish(key, np.zeros((4, 4))[:, 1])
    with pytest.raises(TypeError):
        publisher.publish(key, 5)
    assert publisher.published() == {}
