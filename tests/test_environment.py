"""What a process of ours sets up for itself."""

import subprocess
import sys


def test_collector_after_startup_looks_only_at_what_came_later():
    code = (
        "import gc, json, asyncio, email; from intarsia.environment import freeze_startup_objects\n"
        "loop = []; loop.append(loop); del loop\n"
        "before = len(gc.get_objects()); freeze_startup_objects(); print(before, len(gc.get_objects()))\n"
        "loop = []; loop.append(loop); del loop; print(gc.collect())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    before, after, collected = map(int, printed)
    assert before > 1000
    assert after < 100
    assert collected >= 1, "what becomes garbage later is still found"
