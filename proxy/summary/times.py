"""The times of a summary, in seconds. Two more are settings: ``summary.timeout`` and ``server.deadline``.

A request waits ``summary.timeout`` for one try. Then the next one begins. After the last one, the request gets a
digest, and the try continues. If no request waits, all tries together have the deadline, and each one at least
``summary.timeout``. A single call to a model may take the longer one of the two.
"""

from proxy.constants import DAY

LIFETIME = 30 * DAY  # of a model's summary in the store
DIGEST = 300.0  # Of a digest in memory. Then the proxy calls a model again. Until then, the prompt stays the same.

LOOKING = 1.5  # for reading this summary and earlier ones, once the worker may make it
SAVING = 0.5  # that a request waits until its summary is stored

LEASE = 5.0  # of a lease after a worker takes or renews it
RENEWING = LEASE / 4  # between two renewals
TAKING = 1.0  # to wait for a lease before the worker starts without one
RELEASING = 5.0  # to release leases when the process ends
POLL, SLOW_POLL = 0.1, 2.0  # between two looks for another worker's summary; the second one if no request waits for it

FIRST_PAUSE, LONGEST_PAUSE = 60.0, 600.0  # without calls to a model that failed
