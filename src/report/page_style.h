// The style sheet of the page. Colours of lines differ in lightness too, for readers who are colour-blind. The names of
// lines have the same colours, so each colour has enough contrast for text (WCAG 2.2, AA). In heat maps a larger value
// has more contrast with the background.
#pragma once

namespace moebius {

inline constexpr char kPageStyle[] = R"css(
:root{color-scheme:light dark;
--bg:#f7f7f5;--card:#fff;--ink:#1c1f24;--soft:#646b75;--grid:#e6e7ea;--edge:#e3e4e7;--mark:#8a919b;--warn:#a33a00;
--c0:#0067a9;--c1:#c25300;--c2:#00836a;--c3:#b5388f;--c4:#8a6d00;--c5:#277cb0;--c6:#7a4b1f;--c7:#59606b;
--s0:#eef3f8;--s1:#dbe7f2;--s2:#c3d9ec;--s3:#a3c7e3;--s4:#7db0d8;--s5:#5797c9;--s6:#367cb6;--s7:#1f629f;--s8:#124a82;--s9:#0b3362;
--d0:#0b4f8a;--d1:#2f77b3;--d2:#6aa3d0;--d3:#a6c9e5;--d4:#d6e6f2;--d5:#f1f0ee;--d6:#f9e0c7;--d7:#f3bf8d;--d8:#e79a56;--d9:#cc7128;--d10:#94480a}
@media(prefers-color-scheme:dark){:root{
--bg:#101215;--card:#181b1f;--ink:#e9ebee;--soft:#9ba3ae;--grid:#2a2f36;--edge:#262a30;--mark:#7d8691;--warn:#ffab73;
--c0:#58b0f0;--c1:#ff9558;--c2:#37c99d;--c3:#e58ccb;--c4:#e2c04b;--c5:#9bdcfb;--c6:#c9a277;--c7:#b0b7c1;
--s0:#1d242d;--s1:#203447;--s2:#224562;--s3:#24587f;--s4:#296d9d;--s5:#3b84b8;--s6:#5a9ccf;--s7:#82b6e2;--s8:#b0d2f1;--s9:#e2f0ff;
--d0:#9bcdf7;--d1:#66a9e0;--d2:#4183ba;--d3:#2c5e89;--d4:#24415b;--d5:#24282e;--d6:#4d3826;--d7:#80532a;--d8:#b4702f;--d9:#e08f3f;--d10:#ffbb73}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main,header{max-width:1240px;margin:0 auto;padding:0 24px}
header{padding-top:28px}
.brand{margin:0;color:var(--soft);font-size:13px;letter-spacing:.02em}
h1{margin:2px 0 0;font-size:28px;line-height:1.2;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{margin:40px 0 12px;font-size:18px;font-weight:650;letter-spacing:-.005em}
h3{margin:0;font-size:15px;font-weight:600}
p{margin:0}
.lead{margin-top:6px;color:var(--soft)}
.note{color:var(--soft);font-size:13px;line-height:1.4}
.warn{color:var(--warn)}
.runs{list-style:none;margin:12px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:6px 20px}
.runs li{display:flex;align-items:center;gap:8px;overflow-wrap:anywhere}
.key{flex:none;display:inline-block;width:18px;height:4px;border-radius:2px;background:currentColor}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));margin:20px 0 0;background:var(--card);
border:1px solid var(--edge);border-radius:10px;overflow:hidden}
.tiles div{padding:12px 16px;box-shadow:1px 0 0 var(--edge),0 1px 0 var(--edge)}
.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{margin:0;font-size:20px;font-weight:600;line-height:1.3;letter-spacing:-.01em}
.tiles dd small{display:block;color:var(--soft);font-size:13px;font-weight:400;letter-spacing:0}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,350px),1fr));gap:14px}
figure,.card{position:relative;margin:0;background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:14px 16px 12px;min-width:0}
figcaption{margin-bottom:8px;min-height:40px}
svg{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}
svg:focus{outline:none}
svg:focus-visible{outline:2px solid var(--c0);outline-offset:4px;border-radius:4px}
svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg text.end{fill:currentColor;font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
svg text.strong{fill:var(--ink)}
svg text.hot{fill:var(--warn);font-weight:600}
.rule{stroke:var(--grid);stroke-width:1;fill:none}
.base{stroke:var(--mark);stroke-width:1;fill:none}
.limit{stroke:var(--mark);stroke-width:1;stroke-dasharray:4 3;fill:none}
.restart{stroke:var(--mark);stroke-width:1;stroke-dasharray:1 3;stroke-linecap:round;fill:none}
.saved{fill:var(--mark)}
.line{fill:none;stroke:currentColor;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.line.raw{stroke-width:1.3}
.band{fill:currentColor;opacity:.2}
.dot{fill:var(--card);stroke:currentColor;stroke-width:1.6}
.dot.full{fill:currentColor;stroke:none}
.seg{fill:currentColor;stroke:var(--card);stroke-width:.75}
.cells{shape-rendering:crispEdges}
.cursor{stroke:var(--mark);stroke-width:1;fill:none;pointer-events:none}
.pick{fill:none;stroke:var(--ink);stroke-width:1.5;pointer-events:none}
.tip{position:absolute;z-index:2;top:0;left:0;pointer-events:none;background:var(--ink);color:var(--card);border-radius:6px;padding:6px 9px;
font-size:13px;line-height:1.35;max-width:260px;overflow-wrap:anywhere;box-shadow:0 2px 10px rgb(0 0 0/.18)}
.tip b{display:block;font-weight:600}
.tip span{display:block}
.legend{list-style:none;margin:8px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft)}
.legend li{display:flex;align-items:center;gap:6px}
.legend i{width:10px;height:10px;border-radius:2px;background:currentColor}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;vertical-align:top;padding:5px 12px 5px 0;border-top:1px solid var(--grid);overflow-wrap:anywhere}
thead th{border-top:0;color:var(--soft);font-weight:600}
tbody th{font-weight:400;color:var(--soft);white-space:nowrap}
td.num,th.num{text-align:right;white-space:nowrap}
td code{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap}
summary{cursor:pointer;font-weight:600;padding:2px 0}
details[open] summary{margin-bottom:8px}
footer{max-width:1240px;margin:32px auto 0;padding:0 24px 40px;color:var(--soft);font-size:13px}
.live{display:inline-flex;align-items:center;gap:6px}
.live::before{content:"";width:8px;height:8px;border-radius:50%;background:var(--c2)}
.live.lost::before{background:var(--c1)}
)css"
                                     R"css(
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}
.s0{fill:var(--s0)}.s1{fill:var(--s1)}.s2{fill:var(--s2)}.s3{fill:var(--s3)}.s4{fill:var(--s4)}.s5{fill:var(--s5)}.s6{fill:var(--s6)}.s7{fill:var(--s7)}.s8{fill:var(--s8)}.s9{fill:var(--s9)}
.d0{fill:var(--d0)}.d1{fill:var(--d1)}.d2{fill:var(--d2)}.d3{fill:var(--d3)}.d4{fill:var(--d4)}.d5{fill:var(--d5)}.d6{fill:var(--d6)}.d7{fill:var(--d7)}.d8{fill:var(--d8)}.d9{fill:var(--d9)}.d10{fill:var(--d10)}
@media(max-width:560px){main,header,footer{padding-left:14px;padding-right:14px}header{padding-top:18px}h1{font-size:23px}h2{margin-top:30px}
figure,.card{padding:12px 12px 10px}figcaption{min-height:0}svg text{font-size:12.5px}
.tiles{grid-template-columns:repeat(2,1fr)}.tiles div{padding:10px 12px}.tiles dd{font-size:18px}tbody th{white-space:normal}}
@media print{body{background:#fff}figure,.card{break-inside:avoid}}
)css";

}  // namespace moebius
