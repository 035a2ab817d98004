"""Latency histograms as csrc/latency.hpp counts them: log-linear buckets, as fio's and HdrHistogram's.

A latency of n nanoseconds falls into bucket n below 64; above, every power of two is cut into 64 equal buckets, so a
bucket is at most 1/64 of its value wide.
"""
