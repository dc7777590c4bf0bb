"""Every module has a test file of its name, or this table names the tests that cover it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

COVERED = {
    "unit/compaction/test_stages.py": "compaction/stages/truncate_args compaction/stages/duplicates "
    "compaction/stages/media compaction/stages/evict_results "
    "compaction/stages/stage",
    "unit/compaction/test_lossless.py": "compaction/stages/lossless",
    "unit/compaction/test_reads.py": "compaction/stages/reads",
    "unit/compaction/test_planning.py": "compaction/gains compaction/render compaction/rules compaction/turn",
    "product/test_newest_plan.py": "compaction/plans",
    "unit/compaction/test_triggers.py": "compaction/settings",
    "unit/config/test_messages.py": "config/fields config/issues config/server "
    "config/store config/teams config/upstreams",
    "unit/config/test_assembly.py": "config/loading",
    "hostile/test_expressions.py": "config/patterns",
    "product/test_commands.py": "cli/commands cli/configuration cli/tables",
    "product/test_dashboard.py": "endpoints/dashboard endpoints/presentation",
    "product/test_backup.py": "cli/forgetting",
    "product/test_finding_requests.py": "cli/requests pipeline/tags",
    "product/test_operator_commands.py": "cli/live server/programs",
    "product/test_latency.py": "records/latency",
    "product/test_parts.py": "compaction/state dialects/walk",
    "product/test_record_paths.py": "cli/records constants endpoints/records endpoints/status "
    "records/report telemetry/record_json",
    "unit/store/test_replicated_map.py": "limits/stored",
    "unit/demo/test_upstream.py": "demo/counting demo/replies server/loopback",
    "unit/demo/test_demo.py": "demo/agent demo/apis demo/run demo/script",
    "unit/dialects/chat/test_counting.py": "dialects/counting tokens/tools",
    "product/http/test_fidelity.py": "dialects/chat/request dialects/request",
    "product/test_refusals_of_all_shapes.py": "pipeline/features/overflow pipeline/response_start",
    "product/test_traits.py": "pipeline/features/traits",
    "unit/upstream/test_public_refusals.py": "upstream/refusals",
    "product/test_silent.py": "pipeline/features/usage_feedback",
    "product/properties/test_money.py": "pipeline/billing",
    "product/http/test_streams.py": "endpoints/reply",
    "product/test_public_reports.py": "pipeline/features/reasoning",
    "unit/dialects/responses/test_state.py": "pipeline/features/server_state",
    "product/test_bridged_answers.py": "upstream/bridge/chat upstream/bridge/messages "
    "upstream/bridge/completions upstream/bridge/over_responses upstream/bridge/responses "
    "upstream/bridge/messages_answers upstream/bridge/responses_answers",
    "product/test_continued_summaries.py": "summary/notes",
    "hostile/test_web_pages.py": "access/web_origins",
    "product/test_compress.py": "endpoints/compress",
    "product/test_library.py": "library",
    "product/test_mcp.py": "endpoints/mcp endpoints/mcp_tools",
    "product/behaviors": "endpoints/conversations",
    "product/http/test_model_list.py": "endpoints/models",
    "product/http/test_passthrough.py": "endpoints/passthrough",
    "product/http/test_restricted.py": "endpoints/restrictions",
    "docs/test_reference.py": "errors telemetry/events telemetry/metrics",
    "product/test_opentelemetry.py": "telemetry/operations telemetry/otel_export",
    "product/test_records.py": "pipeline/changes",
    "product/http/test_upstream_keys.py": "http/headers upstream/relay",
    "hostile/test_bodies.py": "http/request_body",
    "product/test_recall.py": "pipeline/features/recall pipeline/sending recall/rounds",
    "product/test_output.py": "limits/budget pipeline/budget",
    "unit/limits/profiles/test_lookup.py": "limits/profiles/tables",
    "unit/overflow/test_recognize.py": "overflow/figures overflow/general overflow/patterns",
    "product/test_retries.py": "pipeline/attempt",
    "product/properties/test_growing.py": "pipeline/compactor pipeline/job",
    "product/http": "pipeline/runtime pipeline/exchange server/app",
    "hostile/test_without_tables.py": "pipeline/measures",
    "product/test_item_references.py": "pipeline/features/item_references pipeline/watching",
    "product/test_summaries.py": "pipeline/summaries",
    "product/test_no_summary_model.py": "summary/writer summary/writers",
    "product/test_reload.py": "server/reload",
    "unit/store/test_sqlite.py": "store/interface store/sqlite_worker",
    "product/http/test_failures.py": "upstream/connections",
    "unit/upstream/litellm/test_transport.py": "upstream/litellm/library",
    "unit/upstream/test_retired.py": "upstream/transport",
    "unit/records/test_sqlite.py": "records/model",
    "unit/records/test_stores.py": "records/redis",
    "unit/dialects/chat/test_units.py": "compaction/format",
    "unit/dialects/chat/test_answers.py": "dialects/answers",
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
