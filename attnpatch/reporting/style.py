"""The page's look: light or dark as the reader's system is, and on paper."""

STYLE = """\
:root { --ink: #1c2126; --soft: #5b656e; --paper: #fff; --card: #f4f6f8; --line: #d5dbe1;
  --good: #1b6b3a; --bad: #a3261b; --full: #2457a6; --partial: #8fb1e3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #9ba6b0; --paper: #15191d; --card: #1f252b; --line: #39424b;
    --good: #6fcf97; --bad: #ff8a7a; --full: #7eaaf2; --partial: #34507f; }
}
* { box-sizing: border-box; }
body { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 1rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
h3, h4 { font-size: 1rem; margin: 0 0 .3rem; }
p { margin: .4rem 0; }
small { color: var(--soft); font-size: .87em; font-weight: normal; }
.facts { display: flex; flex-wrap: wrap; gap: .5rem; margin: 0; padding: 0; list-style: none; }
.facts li { padding: .4rem .8rem; border: 1px solid var(--line); border-radius: .4rem; background: var(--card); }
.good { color: var(--good); }
.facts .bad { color: var(--bad); border-color: currentColor; }
article, details { margin: .5rem 0; padding: .6rem .9rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .4rem; }
article.bad { border-left: .3rem solid var(--bad); }
summary { cursor: pointer; }
summary span { display: inline-block; margin-left: .4rem; padding: 0 .5rem; border: 1px solid var(--line);
  border-radius: 1rem; background: var(--paper); font-size: .87em; white-space: nowrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: normal;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: normal; }
td { min-width: 4rem; font-variant-numeric: tabular-nums; }
.mask { display: flex; flex-wrap: wrap; gap: 1rem 2rem; margin-top: .8rem; }
.mask > * { flex: 1 1 18rem; }
dl { margin: 0; }
dt { font-weight: 600; }
dd { margin: 0 0 .3rem 1rem; color: var(--soft); }
figure { margin: 0; }
figcaption { color: var(--soft); font-size: .87em; }
svg { display: block; width: 13rem; height: 13rem; max-width: 100%; margin-bottom: .4rem; }
.key::before { content: ""; display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .6em;
  border: 1px solid var(--line); vertical-align: -.05em; }
path.full { fill: var(--full); }
path.partial { fill: var(--partial); }
path.empty { fill: none; stroke: var(--line); stroke-width: .06; }
.key.full::before { background: var(--full); }
.key.partial::before { background: var(--partial); }
@media print {
  :root { --ink: #000; --soft: #444; --paper: #fff; --card: #fff; --line: #bbb; --good: #1b6b3a; --bad: #a3261b;
    --full: #2457a6; --partial: #8fb1e3; }
  body { max-width: none; padding: 0; font-size: 11px; print-color-adjust: exact; }
  article, details, figure, tr { break-inside: avoid; }
}
"""
