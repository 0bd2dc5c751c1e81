"""The page of a plan with some 20,000 values: its size, and the CPU time and memory of a browser.

    python benchmarks/page.py [--layers 192] [--page FILE.html]

Debian's chromium is driven over pipes by its debugging protocol. Times are those of the page's main
thread (CPU, not the clock): loading with the first layout, then each action with the layout after.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from torchgspmd import Mesh, plan

GPT = Path(__file__).resolve().parents[1] / "examples" / "gpt" / "model.py"
BAR_LOAD, BAR_ACTION = 3.0, 0.2  # seconds

ACTIONS = {
    "tab Communication": "tab('Communication')",
    "sort collectives": "query('th', 3).click()",
    "filter collectives": "type('backward model')",
    "tab Model": "tab('Model')",
    "open layers": "query('summary', 1).click()",
    "open a layer": "query('summary', 2).click()",
    "tab Values": "tab('Values')",
    "scroll values": "document.getElementById('view').scrollTop = 1e5",
    "click a value": "query('#values .row', 30).click()",
    "filter values": "type('einsum backward')",
    "clear the filter": "type('')",
    "tab Step": "tab('Step')",
    "zoom": "zoom()",
    "click the time line": "pick()",
}
HELPERS = """
const query = (where, n = 0) => document.querySelectorAll(where)[n];
const tab = name => {
  for (const button of document.querySelectorAll('#tabs button'))
    if (button.textContent === name) button.click();
};
const type = text => { query('#filter').value = text; query('#filter').oninput(); };
const over = (kind, more = {}) => {
  const box = query('#timeline').getBoundingClientRect();
  const event = kind === 'wheel' ? WheelEvent : MouseEvent;
  const place = { clientX: box.left + 300, clientY: box.top + 20 };
  query('#timeline').dispatchEvent(new event(kind, { ...place, ...more }));
};
const zoom = () => over('wheel', { deltaY: -1 });
const pick = () => { over('mousemove'); over('click'); };
const settled = () => new Promise(done => requestAnimationFrame(() => {
  document.body.offsetHeight;
  setTimeout(done, 50);
}));
"""


class Browser:
    """A headless Chromium with one page, spoken to over pipes."""

    def __init__(self, profile: str) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None:
            raise SystemExit("needs chromium: apt-get install chromium")
        (its_input, self.input), (self.output, its_output) = os.pipe(), os.pipe()

        def connect() -> None:
            os.dup2(its_input, 30)
            os.dup2(its_output, 31)
            os.dup2(30, 3)
            os.dup2(31, 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            [program, *options, f"--user-data-dir={profile}", "--window-size=1400,900"],
            preexec_fn=connect,
            pass_fds=(3, 4, its_input, its_output),
            stderr=subprocess.DEVNULL,
        )
        self.number, self.rest, self.session = 0, b"", ""
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer of a command."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.input, json.dumps(command).encode() + b"\0")
        while (answer := self._message()).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            self.rest += os.read(self.output, 2**20)
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def run(self, code: str) -> Any:
        """Return the value of an expression of the page; a promise is waited for."""
        done = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{code}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def metrics(self) -> dict[str, float]:
        """Return counters of the page: TaskDuration is the CPU time of its main thread."""
        found = self.call("Performance.getMetrics")["metrics"]
        return {each["name"]: each["value"] for each in found}


def measure(page: Path) -> dict[str, float]:
    """Return the CPU seconds of loading and of each action, and the memory in MB."""
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(profile)
        try:
            browser.call("Performance.enable", timeDomain="threadTicks")
            browser.call("Page.navigate", url=page.resolve().as_uri())
            while browser.run("document.readyState") != "complete":
                time.sleep(0.2)
            browser.run(HELPERS + "settled()")
            last = times["load"] = browser.metrics()["TaskDuration"]
            for name, code in ACTIONS.items():
                browser.run(f"{code}; settled()")
                now = browser.metrics()["TaskDuration"]
                times[name], last = now - last, now
            times["heap, MB"] = browser.metrics()["JSHeapUsedSize"] / 1e6
        finally:
            browser.process.terminate()
            browser.process.wait()
    return times


def write_page(path: Path, layers: int) -> int:
    """Write the page of a GPT of so many layers, and return how many values it has."""
    mesh = Mesh(data=8, model=8)
    with torch.device("meta"):
        example = runpy.run_path(str(GPT))["example"]
        model, batch = example(mesh, "tp", layers=layers)
    result = plan(model, *batch, mesh=mesh, grad=True)
    result.html(path, "h100", "GPT")
    return len(result.sharded.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=192)
    parser.add_argument("--page", type=Path, help="measure this page")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = args.page or Path(folder) / "plan.html"
        if args.page is None:
            print(f"{write_page(page, args.layers)} values")
        print(f"{page.stat().st_size / 1e6:.1f} MB")
        times = measure(page)
    for name, value in times.items():
        print(f"{name:22} {value:8.3f}" + (" s" if "MB" not in name else ""))
    slowest = max(times[name] for name in ACTIONS)
    bars = f"bars: {BAR_LOAD} s to load, {BAR_ACTION} s for an action"
    print(f"load {times['load']:.2f} s, slowest action {slowest:.2f} s; {bars}")
    raise SystemExit(times["load"] > BAR_LOAD or slowest > BAR_ACTION)


if __name__ == "__main__":
    main()
