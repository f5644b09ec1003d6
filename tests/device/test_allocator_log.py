import pytest

from kbatch.device.memory import FreeMemory, free_memory

# Lines of a real dump: a step of 600 images under 190 MiB; most of its blocks are left out.
DUMP = """\
2026-01-05 09:00:28.783104: W external/xla/bfc_allocator.cc:502] Allocator \
(bfc_cpu_allocator_for_gpu) ran out of memory trying to allocate 37.50MiB (rounded to 39321600)\
requested by op StatefulPartitionedCall/gradient_tape/ReluGrad
bfc_allocator.cc:1045] BFCAllocator dump for bfc_cpu_allocator_for_gpu
bfc_allocator.cc:1056] Bin (16777216): 	Total Chunks: 1, Chunks in use: 0. 24.97MiB allocated
bfc_allocator.cc:1085] Next region of size 67108864
bfc_allocator.cc:1105] InUse at 7f13a9606080 of size 67108864 next 18446744073709551615
bfc_allocator.cc:1105] InUse at 7f13a5000040 of size 7372800 next 12
bfc_allocator.cc:1105] Free  at 7f13a5606040 of size 26181632 next 18446744073709551615
bfc_allocator.cc:1105] Free  at 7f13c0bba040 of size 4194304 next 18446744073709551615
bfc_allocator.cc:1105] Free  at 7f13d9400840 of size 256 next 217
bfc_allocator.cc:1117] Sum Total of in-use chunks: 159.92MiB
bfc_allocator.cc:1119] Total size in pool: 190.00MiB memory_limit_: 190.00MiB available size: 0B \
curr_region_allocation_bytes_: 256.00MiB
"""
FREE = FreeMemory(39_321_600, 26_181_632 + 4_194_304 + 256, 26_181_632)


def test_free_blocks_are_summed_and_the_largest_is_told():
    assert free_memory("started\n" + DUMP + "traceback") == FREE


def test_memory_that_was_never_taken_is_one_more_block():
    found = free_memory(DUMP.replace("available size: 0B", "available size: 30.50MiB"))
    assert found.largest_block_bytes == 30.5 * 2**20
    assert found.free_bytes == FREE.free_bytes + 30.5 * 2**20


def test_the_last_failure_counts():
    later = DUMP.replace("39321600", "256").replace("26181632", "1024")
    assert free_memory(DUMP + later) == FreeMemory(256, 1024 + 4_194_304 + 256, 4_194_304)


@pytest.mark.parametrize("log", ["", "all is well", DUMP[:400], DUMP[: DUMP.index("Total size")]])
def test_a_failure_that_was_not_written_whole_tells_nothing(log):
    assert free_memory(log) is None
