"""What an exchange between two ranks on one machine costs: our socket collectives beside gloo, in one run.

    python bench/collectives.py [--bytes 512,32768,1048576] [--repeats 300]

Prints one JSON object; microseconds are medians over the repeats.
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from intarsia.proto.channel import Address
from intarsia.workers.collectives import SocketCollectives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=lambda text: [int(n) for n in text.split(",")], default=[512, 32768, 1048576])
    parser.add_argument("--repeats", type=int, default=300)
    args = parser.parse_args()
    context = mp.get_context("spawn")
    ports, rows = context.SimpleQueue(), context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_rank, args=(rank, store.port, ports, rows, args.bytes, args.repeats))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    result = rows.get()
    for rank in ranks:
        rank.join()
    json.dump(
        {"benchmark": "collectives", "ranks": 2, "torch": torch.__version__, "rows": result}, sys.stdout, indent=2
    )
    print()


def _rank(rank: int, store_port: int, ports: Any, rows: Any, sizes: list[int], repeats: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ours = SocketCollectives(rank, 2)
    mine = ours.meeting_point("127.0.0.1")
    addresses: list[Any] = [None, None]
    dist.all_gather_object(addresses, tuple(mine))
    ours.join([Address(*address) for address in addresses])
    result = []
    for size in sizes:
        tensor = torch.zeros(size // 4)
        result.append(
            {
                "bytes": size,
                "socket_us": _median_us(lambda t=tensor: ours.all_reduce(t), repeats),
                "gloo_us": _median_us(lambda t=tensor: dist.all_reduce(t), repeats),
            }
        )
    if rank == 0:
        rows.put(result)
    dist.barrier()
    ours.close()
    dist.destroy_process_group()


def _median_us(call: Any, repeats: int) -> float:
    call()
    dist.barrier()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e6, 1)


if __name__ == "__main__":
    main()
