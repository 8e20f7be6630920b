"""The dashboard looked at while a shaped link changes: ``python -m studies.dashboard --output FOLDER``.

__main__   the testbed of the experiments, `edge-client dashboard` on its edge, the link's rate changed under it
cost       what looking on costs a request: ``python -m studies.dashboard.cost``
browser    a headless browser in the edge's network namespace: pictures of the page, and what it says
"""
