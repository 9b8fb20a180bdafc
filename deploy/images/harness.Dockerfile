# An environment host of one harness, with its own locked packages, as `vla env install` makes them:
#   docker build -f deploy/images/harness.Dockerfile --build-arg HARNESS=maniskill .
FROM python:3.11-slim
ARG HARNESS=maniskill
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY platform platform
COPY storage storage
# The platform without its dependencies: those that the harness needs are in its locks.
RUN pip install --no-deps . \
 && python -c "import pathlib, vla_platform.envs.installs as i; i.install('${HARNESS}', pathlib.Path('/opt/vla'), system_packages=True)" \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 vla
USER 10001
WORKDIR /var/lib/vla
ENV VLA_HARNESS=${HARNESS} PATH=/opt/vla/envs/${HARNESS}/bin:${PATH}
ENTRYPOINT ["python", "-m"]
