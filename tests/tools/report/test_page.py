"""The page of a plan says what the plan says; a browser opens it, sorts, filters and clicks."""

import html
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd import Mesh

ROOT = Path(__file__).resolve().parents[3]
GPT = ROOT / "examples" / "gpt" / "model.py"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")

# Clicks through the page, and leaves what it saw in the document.
VISIT = """
<script>
const errors = [], seen = {}, click = (where, n = 0) => document.querySelectorAll(where)[n].click();
const type = (where, text) => {
  const box = document.querySelector(where);
  box.value = text;
  box.oninput();
};
window.onerror = message => errors.push(message);
const all = where => [...document.querySelectorAll(where)];
const tab = name => all("#tabs button").find(b => b.textContent === name).click();
const column = n => all("tbody tr").map(row => row.children[n].textContent);
setTimeout(() => {
  try {
    seen.title = document.title;
    seen.legend = document.getElementById("detail").textContent;
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    seen.next = document.querySelector("#tabs .on").textContent;
    tab("Communication"); seen.kinds = column(0);
    click("th", 3); seen.counts = column(3);
    type("#filter", "all_reduce backward"); seen.filtered = column(0); seen.phases = column(2);
    click("tbody tr");
    seen.collective = document.getElementById("selected").textContent;
    seen.step = document.getElementById("why").textContent;
    seen.users = document.getElementById("users").textContent;
    tab("Model"); seen.tree = all("#view summary").map(each => each.textContent);
    const blocks = all("#view details")[1];
    blocks.open = true; blocks.dispatchEvent(new Event("toggle"));
    seen.folded = [...blocks.querySelectorAll("summary")].map(each => each.textContent);
    tab("Values"); type("#filter", "attention");
    seen.rows = document.querySelectorAll("#values .row").length;
    click("#values .row");
    seen.why = document.getElementById("why").textContent;
    seen.cells = document.querySelectorAll("#grid .cell").length;
    tab("Unasked"); seen.whole = column(0);
    tab("Step"); seen.canvas = document.getElementById("timeline").width;
  } catch (error) { errors.push(String(error)); }
  const textContent = JSON.stringify({ ...seen, errors });
  document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent }));
}, 200);
</script>
"""


@pytest.fixture(scope="module")
def planned():
    mesh = Mesh(data=2, model=4)
    with torch.device("meta"):
        options = dict(batch=8, context=32, layers=2, heads=4, width=32, vocabulary=64)
        model, batch = runpy.run_path(str(GPT))["example"](mesh, "tp", **options)
    return gspmd.plan(model, *batch, mesh=mesh, grad=True)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S)[1])


def test_the_page_has_the_plan(planned, tmp_path):
    planned.html(tmp_path / "plan.html", title="</script><b>")
    page = (tmp_path / "plan.html").read_text()
    data = data_of(page)
    assert data["title"] == "</script><b>" and "http" not in page.split("<script")[0]
    names = {value["name"] for value in data["values"]}
    assert {row[-1] for row in data["collectives"]} <= names
    assert sum(row[4] for row in data["collectives"]) == pytest.approx(planned.sent_bytes)
    assert {name for _, name in data["tree"]} <= names
    modules = {event["module"] for event in data["events"] if event["stream"] == "compute"}
    assert {"blocks.0", "blocks.1"} <= {".".join(path.split(".")[:2]) for path in modules}
    for value in data["values"]:
        assert set(value["operands"]) <= names | {n.name for n in planned.sharded.nodes}
        assert all(0 <= line < len(data["lines"]) for line in value["why"])


class Pipelined(torch.nn.Module):
    def __init__(self, mesh):
        super().__init__()
        blocks = [torch.nn.Linear(8, 8) for _ in range(2)]
        self.blocks = gspmd.pipeline(blocks, mesh, microbatches=4, schedule="1f1b", loss=self.loss)

    def loss(self, y):
        return y.square().mean()

    def forward(self, x):
        return self.blocks(x)


def test_the_page_has_the_picture_of_a_pipeline(tmp_path):
    mesh = Mesh(stage=2)
    plan = gspmd.plan(Pipelined(mesh), torch.zeros(8, 8), mesh=mesh, grad=True)
    plan.html(tmp_path / "plan.html")
    data = data_of((tmp_path / "plan.html").read_text())
    [(title, picture)] = data["pipelines"]
    assert title in plan.summary() and "1f1b 2x4" in title
    assert sum(row[4] for row in data["collectives"]) == pytest.approx(plan.sent_bytes)
    for piece in ("F", "B"):
        assert len(re.findall(rf"<title>\d{piece}\d", picture)) == 2 * 4


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_shows_it(planned, tmp_path):
    path = tmp_path / "plan.html"
    planned.html(path, title="GPT")
    path.write_text(path.read_text().replace("</html>", VISIT + "</html>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *options, path.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    report = planned.report()
    assert seen["errors"] == [] and seen["title"] == "GPT"
    assert "pending" in seen["legend"] and seen["next"] == "Communication"
    assert seen["kinds"] == [row.kind for row in report.collectives]
    assert list(map(int, seen["counts"])) == sorted(
        (r.count for r in report.collectives), reverse=True
    )
    assert set(seen["filtered"]) == {"all_reduce"} and set(seen["phases"]) == {"backward"}
    assert seen["collective"].startswith("%")
    assert re.match(r"a step between two layouts: \[.*\] -> \[.*\]", seen["step"])
    assert re.match("used by (%|the result)", seen["users"])
    assert seen["tree"] == ["GPT", "blocks", "norm"]
    assert seen["folded"] == ["blocks", "0 to 1, 2 alike"]
    assert seen["rows"] > 2 and "marked at" in seen["why"] and seen["cells"] == 8
    assert "position" in seen["whole"] and seen["canvas"] > 100


def test_the_three_lines_of_the_docs_write_a_page(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "report.md").read_text()
    code = re.search(r"```python\n(import torch\n+def example.*?)```", text, re.S)[1]
    command = re.search(r"^torchgspmd (plan mine\.py .*)$", text, re.M)[1]
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["torchgspmd", *command.split()])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("torchgspmd", run_name="__main__")
    assert exit_.value.code == 0
    data = data_of((tmp_path / "plan.html").read_text())
    assert {name for name, _ in data["tree"]} == {
        f"{i}.{p}" for i in "02" for p in ("weight", "bias")
    }
    assert data["title"] == "mine" and "whole on every device" in capsys.readouterr().out
