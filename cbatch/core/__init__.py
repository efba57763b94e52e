"""The scheduler and everything it decides with: integers and numpy only.

No module imports torch, reads a clock, draws a random number or iterates over a set. So the same
object runs in production, in the simulator, in the tests and in the benchmarks.
"""
