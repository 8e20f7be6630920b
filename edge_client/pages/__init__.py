"""Pages of results: one file of HTML each, that asks no network for anything and can be read by everybody.

rendering  a template, the styles, the scripts and the data as one file
words      numbers as people read them
blocks     layers folded into blocks, by their names

The styles are page.css and chart.css (what a saved chart takes along); the frame of every page is frame.html.j2. The
scripts: kit.js (numbers, elements, tooltips, the keyboard), figure.js (a chart that is saved as SVG and CSV, has its
numbers behind it, and is redrawn for paper), and a file for each kind of chart: bars, columns, scatter, lines, heat.
"""
