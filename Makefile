PYTHON ?= python3
STAMP := .venv/.installed

.PHONY: venv demo test clean

venv: $(STAMP)

$(STAMP): pyproject.toml tools/constraints.txt
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	.venv/bin/pip install -c tools/constraints.txt -e '.[s3,train,dev]'
	touch $@

demo: venv
	.venv/bin/python tools/demo.py
	.venv/bin/python tools/demo_train.py

test: venv
	tools/check
	.venv/bin/python -m pytest -q

clean:
	rm -rf .venv build dist *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
