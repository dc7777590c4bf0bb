"""Test tenants, policies, and the checks of keys."""

import hashlib
from datetime import UTC, datetime

import pytest

from proxy.access.authenticator import Authenticator
from proxy.config import Settings
from proxy.errors import NotAuthenticated
from proxy.http.headers import Credential, RawHeaders
from tests.kit.configurations import loads

SEARCH, SECOND, CHAT = "cp-search-key-0001", "cp-search-key-0002", "cp-search-key-000"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sent(authorization: str | None = None, api_key: str | None = None, x_api_key: str | None = None) -> RawHeaders:
    given = (("api-key", api_key), ("x-api-key", x_api_key), ("authorization", authorization))
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in given if value is not None]


def settings(mode: str) -> Settings:
    return loads(
        f"""
auth: {{mode: {mode}}}
upstreams: {{main: {{api_key: sk-upstream}}}}
policies: {{careful: {{keep: {{messages: 40}}}}}}
teams:
  search:
    keys: ["sha256:{sha256(SEARCH)}", "sha256:{sha256(SECOND).upper()}"]
    policy: careful
    models: ["gpt-5*", support-bot]
  chat:
    keys: ["sha256:{sha256(CHAT)}"]
  closed:
    models: []
""".encode(),
        {},
    )


@pytest.mark.parametrize("key", [SEARCH, SECOND])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_a_teams_key_makes_the_team_the_tenant(key: str, scheme: str) -> None:
    caller = Authenticator(settings("keys")).authenticate(sent(f"{scheme} {key}"))
    assert (caller.tenant, caller.team, caller.policy.name) == ("team:search", "search", "careful")


@pytest.mark.parametrize(
    ("headers", "team", "key"),
    [
        (sent(x_api_key=CHAT), "chat", Credential(CHAT, "x-api-key")),
        (sent(f"Bearer {SEARCH}", CHAT, CHAT), "search", Credential(SEARCH, "authorization")),
        (sent(None, CHAT, SEARCH), "search", Credential(SEARCH, "x-api-key")),
        (sent("Bearer ", CHAT, " "), "chat", Credential(CHAT, "api-key")),
        (sent("Basic eA==", None, CHAT), "chat", Credential(CHAT, "x-api-key")),
        ([*sent(x_api_key=CHAT), *sent(x_api_key=SEARCH)], "chat", Credential(CHAT, "x-api-key")),
    ],
)
def test_one_key_of_several_counts_for_identity_and_upstream(headers: RawHeaders, team: str, key: Credential) -> None:
    caller = Authenticator(settings("open")).authenticate(headers)
    assert (caller.team, caller.credential) == (team, key)
    assert Authenticator(settings("keys")).authenticate(headers).team == team


EXPIRING = f"""
auth: {{mode: %s}}
upstreams: {{main: {{api_key: sk-upstream}}}}
teams:
  search:
    keys:
      - {{hash: "sha256:{sha256(SEARCH)}", expires: 2027-01-31, name: laptop}}
      - "sha256:{sha256(SECOND)}"
    limits: {{concurrent: 3}}
"""
LAST_SECOND = datetime(2027, 1, 30, 23, 59, 59, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("mode", ["keys", "open"])
def test_a_key_is_refused_from_the_day_on_which_it_expires(mode: str) -> None:
    now = LAST_SECOND
    teams = Authenticator(loads((EXPIRING % mode).encode(), {}), lambda: now)
    assert teams.authenticate(sent(f"Bearer {SEARCH}")).team == "search"
    now += 1
    for authorization, api_key in ((f"Bearer {SEARCH}", None), (None, SEARCH)):
        with pytest.raises(NotAuthenticated) as caught:
            teams.authenticate(sent(authorization, api_key))
        assert caught.value.message == (
            "This API key expired on 2027-01-31 (UTC). Ask the operator of this proxy for a new one."
        )
    assert teams.authenticate(sent(f"Bearer {SECOND}")).team == "search", "the team's other key goes on"


def test_a_teams_limits_come_with_its_caller() -> None:
    teams = Authenticator(loads((EXPIRING % "open").encode(), {}), lambda: LAST_SECOND)
    limits = teams.authenticate(sent(f"Bearer {SECOND}")).limits
    assert limits is not None
    assert (limits.requests_per_minute, limits.concurrent, limits.summary_tokens_per_day) == (None, 3, None)
    assert teams.authenticate(sent("Bearer sk-anybody")).limits is None


def test_open_every_key_is_a_tenant_of_its_own() -> None:
    teams = Authenticator(settings("open"))
    one, two = (
        teams.authenticate(sent("Bearer sk-caller-000000000000001")),
        teams.authenticate(sent("Bearer sk-caller-000000000000002")),
    )
    assert one.tenant == "key:" + sha256("sk-caller-000000000000001")
    assert one.tenant != two.tenant
    assert one.credential == Credential("sk-caller-000000000000001", "authorization")
    assert (one.team, one.policy.name, one.models) == (None, "default", None)


def test_open_another_scheme_is_no_key_and_still_not_anonymous() -> None:
    teams = Authenticator(settings("open"))
    one, two = teams.authenticate(sent("Basic b25l")), teams.authenticate(sent("Basic dHdv"))
    assert one.credential is None
    assert len({one.tenant, two.tenant, "anonymous"}) == 3


def test_no_caller_can_take_the_tenant_of_a_team_or_of_the_anonymous() -> None:
    teams = Authenticator(settings("open"))
    for key in ("team:search", "anonymous", f"key:{sha256('x')}"):
        assert teams.authenticate(sent(f"Bearer {key}")).tenant == "key:" + sha256(key)


def test_a_key_is_not_in_the_representation() -> None:
    assert SEARCH not in repr(Authenticator(settings("open")).authenticate(sent(f"Bearer {SEARCH}")))
