# The image of every service in docker-compose.yml.
FROM python:3.11-slim AS requirements
COPY pyproject.toml .
RUN python -c "import tomllib as t; print(*t.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    >/requirements.txt

FROM python:3.11-slim
ENV PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_TELEMETRY_ENABLED=0

# What pip is told to install: by default the CPU build, which is a fraction of the one with CUDA.
# TORCH=torch is the one with CUDA; TORCH="torch --no-index --find-links ..." takes a wheel from a folder of the image.
ARG TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
# No compiler is here to use torch's headers, and nobody runs its own tests.
RUN pip install $TORCH && cd /usr/local/lib/python3.11/site-packages/torch && rm -rf include test
# Made above, so that neither a changed setting nor changed code installs anything again.
COPY --from=requirements /requirements.txt /
RUN pip install -r /requirements.txt

# Docker gives a new volume the owner of the folder that it is mounted on.
RUN useradd --uid 10001 --create-home fedact \
    && install -d -o fedact -g fedact /records /state /home/fedact/.flwr \
    && install -d -m 1777 /database # with TLS the SuperLink runs as the one who owns its key
COPY docker/flower.toml /home/fedact/.flwr/config.toml
COPY . /app
WORKDIR /app
# `fedact` runs from a clone, see read_defaults.
RUN pip install --no-deps --editable .
USER fedact
