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
:root { color-scheme: light dark; --line: #8884; --soft: #8881;
  --fail: #c62828; --warn: #9a5b00; --ok: #1a7f37; --na: #6b7280; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.2rem auto; max-width: 76rem; padding: 0 1rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .3rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p { margin: .3rem 0; }
code { font: 13px/1.5 ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; }
th, td { text-align: left; vertical-align: top; padding: .22rem .6rem; border-bottom: 1px solid var(--line); }
th { font-weight: 600; background: var(--soft); white-space: nowrap; overflow-wrap: normal; }
.short { white-space: nowrap; overflow-wrap: normal; }
.limit { font-size: 13px; color: var(--na); }
.verdict { display: inline-block; min-width: 3.2em; padding: 0 .5em; border-radius: .3em; text-align: center;
  font-size: 13px; font-weight: 600; color: #fff; background: var(--na); white-space: nowrap; }
.fail { background: var(--fail); } .warn { background: var(--warn); } .ok { background: var(--ok); }
tr.is-fail td:first-child { box-shadow: inset 4px 0 var(--fail); }
tr.is-warn td:first-child { box-shadow: inset 4px 0 var(--warn); }
.bar { display: grid; grid-template-columns: 12rem 1fr 5rem; gap: .5rem; align-items: center; }
.bar div { background: #4c8bf5; height: .8rem; border-radius: 2px; min-width: 1px; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.rows { columns: 20rem; margin: .2rem 0; padding-left: 1.2rem; list-style: none; }
.rows li { break-inside: avoid; padding-left: 1rem; text-indent: -1rem; font: 13px/1.5 ui-monospace, monospace; }
details { margin: .3rem 0; } summary { cursor: pointer; }
.advice { border-left: 3px solid var(--line); padding-left: .7rem; }
</style>
</head>
<body>
{% macro badge(verdict) %}<span class="verdict {{ css(verdict) }}">{{ verdict }}</span>{% endmacro %}
<h1>Data check {{ badge(report.verdict) }}</h1>
<p>{% for file in report.files %}<code>{{ file }}</code> {% endfor %}</p>
<p>{{ report.summary() }}</p>
<table>
<tr><th>check</th><th>verdict</th><th>measured</th><th>limit</th></tr>
{% for finding in report.findings -%}
<tr class="is-{{ css(finding.verdict) }}"><td class="short"><a href="#{{ finding.check }}">{{ finding.check }}</a></td>
<td class="short">{{ badge(finding.verdict) }}</td>
<td>{{ finding.measured }}</td><td class="short limit">{{ finding.limit }}</td></tr>
{% endfor -%}
</table>
<p>made by <code>{{ report.command }}</code></p>
{% for finding in report.worst_first() -%}
<h2 id="{{ finding.check }}">{{ finding.check }} {{ badge(finding.verdict) }}</h2>
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
<ul class="rows">
{% for place in fault.places -%}
<li>{{ place }}</li>
{% endfor -%}
{% set more = fault.count - fault.places | length -%}
{% if more %}<li>and {{ "{:,}".format(more) }} more</li>{% endif %}
</ul></details>
{% endfor -%}
{% if finding.figures -%}
<details><summary>figures</summary><table>
{% for name, value in finding.figures.items() -%}
<tr><td class="short">{{ name }}</td><td>{{ value }}</td></tr>
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
