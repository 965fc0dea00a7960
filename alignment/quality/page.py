"""The report as one page of HTML that needs nothing else: no script, no font, no address."""

from __future__ import annotations

from alignment.quality.report import Report

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Data check: {{ report.verdict }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
code { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th { font-weight: 600; background: var(--soft); }
.verdict { font-weight: 600; white-space: nowrap; }
.fail { color: #d1242f; } .warn { color: #bc7a00; } .ok { color: #2da44e; } .na { color: #888; }
.bar { display: grid; grid-template-columns: 12rem 1fr 5rem; gap: .5rem; align-items: center; }
.bar div { background: #4c8bf5; height: .8rem; border-radius: 2px; min-width: 1px; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
details { margin: .3rem 0; } summary { cursor: pointer; }
.advice { border-left: 3px solid var(--line); padding-left: .7rem; }
</style>
</head>
<body>
<h1>Data check: <span class="{{ css(report.verdict) }}">{{ report.verdict }}</span></h1>
<p>{% for file in report.files %}<code>{{ file }}</code> {% endfor %}<br>{{ report.summary() }}</p>
<p><code>{{ report.command }}</code></p>
<table>
<tr><th>check</th><th>verdict</th><th>measured</th><th>limit</th></tr>
{% for finding in report.findings -%}
<tr><td><a href="#{{ finding.check }}">{{ finding.check }}</a></td>
<td class="verdict {{ css(finding.verdict) }}">{{ finding.verdict }}</td>
<td>{{ finding.measured }}</td><td>{{ finding.limit }}</td></tr>
{% endfor -%}
</table>
{% for finding in report.findings -%}
<h2 id="{{ finding.check }}">{{ finding.check }}
<span class="{{ css(finding.verdict) }}">{{ finding.verdict }}</span></h2>
<p>{{ finding.measured }}</p>
{% if finding.advice and finding.verdict != "ok" %}<p class="advice">{{ finding.advice }}</p>{% endif %}
{% set most = finding.histogram.values() | max if finding.histogram else 0 -%}
{% for label, count in finding.histogram.items() -%}
<div class="bar"><span>{{ label }}</span><div style="width: {{ "%.1f" | format(100 * count / most) }}%"></div>
<span class="number">{{ "{:,}".format(count) }}</span></div>
{% endfor -%}
{% for fault in finding.faults if fault.count -%}
<details{% if finding.verdict in ("fail", "warn") %} open{% endif %}><summary>{{ fault.what }}:
{{ "{:,}".format(fault.count) }}</summary>
<code>{{ fault.places | join("; ") }}{% if fault.count > fault.places | length %}; ...{% endif %}</code></details>
{% endfor -%}
{% if finding.figures -%}
<details><summary>figures</summary><table>
{% for name, value in finding.figures.items() -%}
<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor -%}
</table></details>
{% endif -%}
{% endfor -%}
</body>
</html>
"""


def html(report: Report) -> str:
    """The page. Whatever rows and file names hold stays text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["css"] = lambda verdict: verdict.replace("/", "")
    return environment.from_string(_TEMPLATE).render(report=report)
