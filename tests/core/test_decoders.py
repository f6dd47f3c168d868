"""Tests of decoders that threads share."""

import subprocess
import sys

# Each child process uses the type for the first time, in several threads.
PROGRAM = """
import os, sys, threading
from flashtune.core.decoders import json_decoder
from flashtune.templates.forward_q_outer.space import QOuterConfig

sys.setswitchinterval(1e-5)
raw = b'{"block_m":64,"block_n":64,"num_warps":4,"num_stages":2}'

def decode():
    barrier.wait()
    json_decoder(QOuterConfig).decode(raw)

for _ in range(200):
    child = os.fork()
    if not child:
        barrier = threading.Barrier(4)
        threads = [threading.Thread(target=decode) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_threads_may_use_a_type_for_the_first_time() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
