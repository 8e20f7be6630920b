"""The dashboard looked at while a shaped link changes: ``python -m studies.dashboard --out FOLDER``.

__main__   the testbed of the experiments, `edge-client dashboard` on its edge, the link's rate changed under it
browser    a headless browser in the edge's network namespace: pictures of the page, and what it says
"""
