"""Memory that is used again: only once nobody sees the tensor any more."""

import threading

import torch

from torchtitan_diloco.outer.buffers import SMALL, Buffers

NUMEL = SMALL  # float32: four times what is worth keeping


def test_memory_comes_back_when_the_last_tensor_that_shares_it_is_gone():
    buffers = Buffers()
    first = buffers.empty(NUMEL).fill_(1.0)
    where = first.data_ptr()
    view = first[10:20].view(torch.int32)
    del first
    assert buffers.free_bytes == 0
    array = view.numpy()
    del view
    other = buffers.empty(NUMEL).fill_(2.0)
    assert other.data_ptr() != where and (array == torch.ones(10).view(torch.int32).numpy()).all()
    del array
    assert buffers.free_bytes > 0
    assert buffers.empty(NUMEL).data_ptr() == where


def test_a_block_serves_any_dtype_of_about_its_size_and_no_much_smaller_one():
    buffers = Buffers()
    where = buffers.empty(8 * NUMEL).data_ptr()
    payload = buffers.empty(8 * 4 * NUMEL - 100, torch.uint8)
    assert payload.data_ptr() == where and payload.numel() == 8 * 4 * NUMEL - 100
    del payload
    assert buffers.empty(4 * NUMEL).data_ptr() != where


def test_released_memory_is_gone_and_what_is_in_use_stays():
    buffers = Buffers()
    held = buffers.empty(NUMEL).fill_(3.0)
    buffers.empty(NUMEL)
    buffers.release()
    assert buffers.free_bytes == 0 and (held == 3.0).all()


def test_small_and_empty_tensors_are_plain_ones():
    buffers = Buffers()
    assert buffers.empty(0).shape == (0,) and buffers.empty(5, torch.uint8).dtype == torch.uint8
    assert buffers.free_bytes == 0


def test_threads_never_share_a_block():
    buffers = Buffers()
    wrong = []

    def work(mark: int) -> None:
        for _ in range(50):
            mine = buffers.empty(NUMEL)
            mine[:100] = mark
            mine[-100:] = mark
            if not ((mine[:100] == mark).all() and (mine[-100:] == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
