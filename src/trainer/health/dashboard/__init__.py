"""One or several runs as one page: `dashboard.html`, or live from a server on this machine.

    read.py       run folders -> series, grids, events; follows files while they are written
    summary.py    the head of the page: a summary of a run
    decimate.py   thousands of steps -> a few hundred buckets that keep their extremes
    page.py       all of it -> one HTML file, made of page.html, page.css and the scripts beside it
    serve.py      the same page, updated every few seconds
    at_end.py     what the trainer writes when a run ends

The package does not import torch.
"""
