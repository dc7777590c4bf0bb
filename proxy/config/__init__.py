"""Configuration: YAML into checked settings, with errors that name the line.

``load``, ``read`` and ``check`` are the doors; ``Settings`` and ``Policy`` are what the rest of the program reads.
"""

from proxy.config.loading import Loaded, check, load, read
from proxy.config.policy import Policy
from proxy.config.settings import ProfileSettings, Route, Settings, UpstreamSettings

__all__ = ["Loaded", "Policy", "ProfileSettings", "Route", "Settings", "UpstreamSettings", "check", "load", "read"]
