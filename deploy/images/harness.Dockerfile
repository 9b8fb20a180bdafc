# An environment host of one harness, with its own locked packages:
#   docker build -f deploy/images/harness.Dockerfile --build-arg HARNESS=maniskill .
FROM python:3.11-slim
ARG HARNESS=maniskill
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY platform platform
COPY storage storage
RUN sh platform/envs/locks/${HARNESS}.debian.sh && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --no-deps -r platform/envs/locks/${HARNESS}.txt \
 && pip install --no-cache-dir --no-deps . \
 && useradd --create-home --uid 10001 vla
USER 10001
WORKDIR /var/lib/vla
ENV VLA_HARNESS=${HARNESS}
ENTRYPOINT ["python", "-m"]
