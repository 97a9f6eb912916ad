"""Measuring: prompt sets, metrics, the benchmark with its one JSON record, studies over it, and the report.

Knows `hf_domino.drafter` only; meets training and publishing in files (a checkpoint folder, a record).
"""
