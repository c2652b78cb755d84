"""Benchmarks of the kernels: `python -m multilora_kernels.bench --help`.

Every module named in `__main__.MODULES` exports `cases() -> list[Case]` (see `timing`).
"""
