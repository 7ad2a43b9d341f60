# Each target does all of its own set-up: a virtual environment in .venv, and the install.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
INSTALLED = .venv/installed

.PHONY: run test lint clean

run: $(INSTALLED)
	.venv/bin/fedact run

test: $(INSTALLED)
	.venv/bin/pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv

$(INSTALLED): pyproject.toml
	@echo "Installing into .venv: some minutes the first time, less than one after a change of pyproject.toml."
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
