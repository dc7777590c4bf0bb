"""Configuration: YAML into checked settings, with errors that name the line.

``load`` and ``check`` are the doors; ``Settings`` and ``Policy`` are what the rest of the program reads.
"""

from proxy.config.loading import check, load
from proxy.config.policy import Policy
from proxy.config.settings import ProfileSettings, Route, Settings, UpstreamSettings

__all__ = ["Policy", "ProfileSettings", "Route", "Settings", "UpstreamSettings", "check", "load"]
