"""The processes in which a judged program runs, and their walls: `specjax.evaluation.sandbox`.

This package imports the standard library alone, because its processes start without any other.
"""
