"""Load YAML files into checked settings. Errors name the line.

Start with ``load`` or ``read``. The rest of the program uses ``Settings`` and ``Policy``.
"""

from proxy.config.loading import Loaded, load, read
from proxy.config.policy import Policy
from proxy.config.settings import Settings
from proxy.config.upstreams import ProfileSettings, Route, UpstreamSettings

__all__ = ["Loaded", "Policy", "ProfileSettings", "Route", "Settings", "UpstreamSettings", "load", "read"]
