"""Every module has a test file of its name, or this table names the tests that cover it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

COVERED = {
    "unit/compaction/test_stages.py": "compaction/stages/arguments "
    "compaction/stages/duplicates compaction/stages/media "
    "compaction/stages/results compaction/stages/stage",
    "unit/compaction/test_planning.py": "compaction/rules compaction/turn",
    "unit/config/test_messages.py": "config/issues config/tree config/scalars config/suggestions "
    "config/fields config/store config/archive "
    "config/server config/log config/upstreams config/models config/teams",
    "unit/config/test_assembly.py": "config/loading",
    "unit/config/test_checks.py": "config/providers",
    "hostile/test_expressions.py": "config/patterns",
    "product/test_commands.py": "cli/commands cli/explain cli/policy_report cli/new_key cli/learned_report cli/forget",
    "product/test_dashboard.py": "access/sessions config/effective endpoints/changes endpoints/charts "
    "endpoints/dashboard endpoints/presentation pipeline/replay",
    "product/test_operator_commands.py": "cli/operations cli/init cli/doctor cli/wrapped_command cli/checking "
    "cli/key_list",
    "product/test_record_paths.py": "cli/records endpoints/records endpoints/status endpoints/viewer "
    "store/ledger_report telemetry/record_json",
    "unit/store/test_replicated_map.py": "limits/stored",
    "unit/demo/test_upstream.py": "demo/counting demo/replies demo/summariser demo/serving",
    "unit/demo/test_demo.py": "demo/agent demo/apis demo/figures demo/run demo/script demo/tools",
    "unit/dialects/chat/test_counting.py": "dialects/counting tokens/text tokens/tools",
    "unit/dialects/chat/test_units.py": "compaction/format",
    "unit/dialects/chat/test_answers.py": "dialects/answers",
    "product/http/test_fidelity.py": "dialects/request dialects/chat/request",
    "product/test_refusals_of_all_shapes.py": "pipeline/refusal pipeline/response_start",
    "product/test_silent.py": "pipeline/usage_feedback",
    "product/properties/test_money.py": "pipeline/billing endpoints/forwarded_costs",
    "product/http/test_streams.py": "dialects/dialect endpoints/reply",
    "unit/dialects/responses/test_state.py": "pipeline/state_recovery",
    "product/test_bridges.py": "upstream/bridge/translation upstream/bridge/transport",
    "product/test_bridged_calls.py": "upstream/bridge/calls",
    "product/test_bridged_answers.py": "upstream/bridge/chat upstream/bridge/messages upstream/bridge/responses "
    "upstream/bridge/response_events upstream/bridge/over_responses",
    "product/test_continued_summaries.py": "pipeline/continuation",
    "product/test_native_compaction.py": "pipeline/native_compaction",
    "product/test_store_commands.py": "cli/store_commands cli/store_migration cli/store_status",
    "product/test_team_limits.py": "access/quotas",
    "hostile/test_web_pages.py": "access/web_origins",
    "product/test_browser.py": "endpoints/landing http/hosts",
    "product/test_archive.py": "endpoints/archive",
    "product/test_mcp.py": "endpoints/mcp endpoints/mcp_tools",
    "product/behaviors": "endpoints/conversations",
    "product/http/test_model_list.py": "endpoints/models",
    "product/http/test_passthrough.py": "endpoints/passthrough",
    "product/http/test_restricted.py": "endpoints/restrictions",
    "docs/test_reference.py": "errors telemetry/metrics",
    "unit/pipeline/test_recorder.py": "telemetry/record",
    "product/test_opentelemetry.py": "config/otel telemetry/gen_ai telemetry/otel_export",
    "product/test_metrics.py": "telemetry/exposition telemetry/request_metrics",
    "unit/server/test_metrics_server.py": "config/metrics",
    "product/test_records.py": "pipeline/changes pipeline/description config/records",
    "product/test_ledger.py": "config/prices",
    "product/http/test_upstream_keys.py": "http/headers upstream/relay",
    "hostile/test_bodies.py": "http/request_body",
    "product/test_recall.py": "pipeline/recall pipeline/recall_rounds pipeline/sending",
    "product/test_output.py": "limits/budget pipeline/budget",
    "unit/limits/profiles/test_lookup.py": "limits/profiles/corrections limits/profiles/litellm_table "
    "limits/profiles/names limits/profiles/profile",
    "unit/overflow/test_recognize.py": "overflow/cleaning overflow/error_detection "
    "overflow/error_fields overflow/exclusions "
    "overflow/figures overflow/general overflow/patterns overflow/reading overflow/echo",
    "product/test_overflow.py": "pipeline/attempts pipeline/decision",
    "product/test_policies.py": "pipeline/request_mode",
    "product/properties/test_growing.py": "pipeline/compactor pipeline/job pipeline/outcome",
    "product/http": "pipeline/context server/app server/runtime",
    "hostile/test_without_tables.py": "pipeline/measures",
    "product/test_learned.py": "pipeline/services",
    "product/test_item_references.py": "pipeline/item_references",
    "product/test_summaries.py": "pipeline/summaries",
    "product/test_summary_limits.py": "pipeline/summary_models",
    "hostile/test_connections.py": "server/connection_limit",
    "hostile/test_leaving.py": "server/half_closed",
    "product/test_reload.py": "server/reload",
    "unit/store/test_object_store.py": "store/object_client",
    "unit/store/test_sqlite.py": "store/file store/interface store/opening store/sqlite_worker store/tenants",
    "unit/store/test_sqlite_records.py": "store/record_codec store/records",
    "unit/summary/test_store.py": "summary/in_flight",
    "unit/telemetry/test_logs.py": "telemetry/tracebacks",
    "unit/tokens/test_media.py": "tokens/images",
    "product/http/test_failures.py": "upstream/connections http/loop_detection",
    "unit/upstream/litellm/test_transport.py": "upstream/litellm/answer upstream/litellm/library "
    "upstream/litellm/providers upstream/litellm/stream",
    "unit/upstream/test_retired.py": "upstream/pool upstream/registry upstream/transport",
}
"""Modules without a test file of their name, by the tests that cover them."""


def test_every_module_has_tests() -> None:
    listed = [module for modules in COVERED.values() for module in modules.split()]
    missing = []
    for path in (ROOT / "proxy").rglob("*.py"):
        module = path.relative_to(ROOT / "proxy")
        named = ROOT / "tests" / "unit" / module.parent / f"test_{module.name}"
        if not module.name.startswith("__") and not named.exists():
            missing.append(module.with_suffix("").as_posix())
    assert sorted(listed) == sorted(missing)


def test_the_listed_tests_exist() -> None:
    assert [place for place in COVERED if not (ROOT / "tests" / place).exists()] == []
