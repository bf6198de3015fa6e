# One image for every role; docker-compose.yml says which role a container plays.
# The digest is that of Python 3.11.15 on Debian 13, as docker-library/repo-info lists it for this tag; it was not
# pulled here. SECURITY.md says how to take a newer one.
FROM python:3.11-slim@sha256:90744cff8f32887f075c47d747a173ff333e9e98801667af93c357fa9f5e28ff

WORKDIR /opt/logweir
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY pipeline pipeline
COPY config config
# Compiled here: the user of the image may not write there, and each process would compile all that it imports.
# Every file by its hash. The setuptools of run.txt builds Logweir: a build environment of its own would fetch one
# without. For a host without a GPU, cpu.txt in place of cuda.txt saves gigabytes where pip finds that build.
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/run.txt -r requirements/cuda.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --system --create-home --uid 10001 logweir \
    && mkdir /data && chown logweir /data
USER logweir
WORKDIR /data
VOLUME /data
ENV LOGWEIR_DATA_DIR=/data PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m"]
CMD ["pipeline.cli", "--help"]
