"""The style sheet of the page: light and dark, wide enough for code, readable when printed."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d232a; --soft: #5d6975; --paper: #ffffff; --tint: #f4f6f8; --line: #d5dbe1;
  --good: #1a7f4b; --bad: #b3261e; --input: #2b6cb0; --state: #8a5a00; --param: #6b46a8; --output: #1a7f4b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ed; --soft: #9aa6b2; --paper: #14181d; --tint: #1d232a; --line: #353f4a;
  --good: #5bc98c; --bad: #ff8a80; --input: #7db4ef; --state: #e0b050; --param: #b89bef; --output: #5bc98c; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; margin: 8px 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 6px; padding-top: 12px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 14px 0 4px; }
p { color: var(--soft); margin: 4px 0 10px; }
pre { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; background: var(--tint); padding: 10px 12px; border-radius: 6px;
  overflow-x: auto; margin: 6px 0; }
table { border-collapse: collapse; }
.wide { overflow-x: auto; }
.facts th { text-align: left; font-weight: 600; color: var(--soft); padding: 2px 18px 2px 0; vertical-align: top; white-space: nowrap; }
.facts td { padding: 2px 0; overflow-wrap: anywhere; }
.costs th, .costs td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
.costs th:first-child, .costs td:first-child { text-align: left; }
.source { width: 100%; background: var(--tint); border-radius: 6px; }
.source pre { background: none; margin: 0; padding: 1px 8px; }
.source .number { color: var(--soft); text-align: right; padding: 0 8px; font: 13px ui-monospace, monospace; }
.source .kinds { white-space: nowrap; width: 1px; }
.source .op pre { color: var(--soft); padding-left: 40px; font-size: 12px; }
.source .at-fault { background: color-mix(in srgb, var(--bad) 18%, transparent); }
.kind { font-size: 11px; padding: 0 6px; border-radius: 8px; border: 1px solid currentColor; }
.kind.step { color: var(--input); } .kind.static, .kind.reduced { color: var(--param); } .kind.problem { color: var(--bad); }
.op .kind { opacity: 0.6; border-color: transparent; }
.badge { font-size: 14px; font-weight: 600; padding: 2px 10px; border-radius: 12px; border: 1px solid currentColor; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
section.problem { border-left: 4px solid var(--bad); padding-left: 16px; }
.problem h2 { border-top: none; color: var(--bad); }
summary { cursor: pointer; margin-top: 8px; }
a { color: var(--input); }
svg.dependencies { max-width: 100%; height: auto; }
svg text { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; fill: var(--ink); }
svg rect { fill: var(--tint); stroke: var(--soft); stroke-width: 1.2; }
svg .input rect { stroke: var(--input); } svg .state rect, svg .next rect { stroke: var(--state); }
svg .param rect { stroke: var(--param); } svg .output rect { stroke: var(--output); }
svg .edge { fill: none; stroke: var(--soft); stroke-width: 1.2; }
svg .loop { fill: none; stroke: var(--state); stroke-width: 1.2; stroke-dasharray: 5 4; }
svg .tip { fill: var(--soft); }
@media print { main { max-width: none; } pre { white-space: pre-wrap; } }
"""
