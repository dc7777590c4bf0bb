"""Check the comparison with Headroom on a generated history, with a stand-in for its environment."""

import gzip
import json
import sys
from pathlib import Path

from click.testing import CliRunner

from bench.quality.compressors import ROWS, main
from bench.quality.conversations import tool_loop
from bench.quality.text import OURS

STAND_IN = f"""#!{sys.executable}
import json, sys
print(json.dumps("1.2.3"), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    print(json.dumps({{"messages": job["messages"][:1], "cpu": job["window"] / 65536}}), flush=True)
"""


def test_the_table_has_the_prompts_of_both(tmp_path: Path) -> None:
    made = tool_loop(1, 60_000)
    case = {"id": "one", "messages": made.messages, "paths": [], "idents": list(made.facts)[:20]}
    (tmp_path / "need-cli.json.gz").write_bytes(gzip.compress(json.dumps([case]).encode()))
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    result = CliRunner().invoke(main, [str(python), "--data", str(tmp_path)], catch_exceptions=False)
    header, _, *lines = (line.strip("| ").split("|") for line in result.output.splitlines())
    names = [name.strip() for name in header]
    rows = [dict(zip(names, map(str.strip, line), strict=True)) for line in lines[:-1]]
    assert [row["method"] for row in rows] == [OURS, ROWS, "Headroom"] * 2
    assert lines[-1] == ["Headroom 1.2.3 without its local models. Sizes and CPU are medians."]
    ours, for_gateways, other = rows[:3]
    size = {row["method"]: int(row["tokens"].replace(",", "")) for row in rows[:3]}
    assert size["Headroom"] < size[OURS] < 32_768 < int(ours["tokens before"].replace(",", ""))
    assert size[ROWS] < 32_768
    assert (ours["too long"], for_gateways["too long"], other["CPU"], rows[5]["CPU"]) == ("0", "0", "500 ms", "1000 ms")
    assert other["identifiers"] == "0 %"
