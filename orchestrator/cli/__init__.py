"""The command `headway`.

Modules with commands do not import `annotations` from `__future__`: typer would evaluate the strings at each start.
"""
