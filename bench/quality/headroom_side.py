"""Compress histories with Headroom, in its own environment. This module imports nothing of the project.

Reads a job per line of standard input (``messages``, ``window``), and writes a result per line of standard output, as
JSON: ``messages`` and the ``cpu`` in seconds. The first line of output has the version.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

from headroom import compress

print(json.dumps(version("headroom-ai")), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    begun = time.process_time()
    # The model for prose needs weights.
    made = compress(job["messages"], model="gpt-4o", model_limit=job["window"], kompress_model="disabled")
    print(json.dumps({"messages": made.messages, "cpu": time.process_time() - begun}), flush=True)
