import torch

from dspark.corpus.buffers import Buffers

LARGE = 1 << 20


def test_memory_is_used_again_when_no_view_of_it_is_left() -> None:
    buffers = Buffers()
    first = buffers.empty(4, LARGE, dtype=torch.float32)
    place, view = first.data_ptr(), first[2, 5:]
    del first
    second = buffers.empty(4, LARGE, dtype=torch.float32)
    assert second.data_ptr() != place
    del view
    third = buffers.empty(3, LARGE, dtype=torch.bfloat16)
    assert third.data_ptr() == place
    assert third.shape == (3, LARGE)
    third.fill_(1)
    second.fill_(2)
    assert bool((third == 1).all())


def test_no_more_than_so_many_are_kept() -> None:
    buffers = Buffers(keep=2)
    tensors = [buffers.empty(LARGE * (n + 1), dtype=torch.uint8) for n in range(5)]
    assert len(buffers._held) == 5
    del tensors
    for n in range(5):
        buffers.empty(LARGE * 40 * (n + 1), dtype=torch.uint8)
    assert len(buffers._held) <= 3


def test_small_ones_are_left_to_the_allocator() -> None:
    buffers = Buffers()
    assert buffers.empty(3, 5, dtype=torch.int64).shape == (3, 5)
    assert not buffers._held
