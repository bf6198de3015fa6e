# One image for every role; docker-compose.yml says which role a container plays.
# The digest is that of Python 3.11.15 on Debian 13, as docker-library/repo-info lists it for this tag; it was not
# pulled here. SECURITY.md says how to take a newer one.
FROM python:3.11-slim@sha256:90744cff8f32887f075c47d747a173ff333e9e98801667af93c357fa9f5e28ff

WORKDIR /opt/logweir
# The packages first: a change of the code builds the last layer only. Every file by its hash.
# TORCH=cpu saves gigabytes, where pip finds that build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
# It comes first, and the torch of run.txt is met then.
ARG TORCH=cuda
ARG PIP_EXTRA_INDEX_URL
COPY requirements requirements
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/${TORCH}.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r requirements/run.txt
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
COPY config config
# Compiled here: the user of the image may not write there, and each process would compile all that it imports.
# The setuptools of run.txt builds Logweir: a build environment of its own would fetch one without a hash.
# Volumes take the owner of the folders that they cover. Fixed numbers: hosts that share a store agree on its owner.
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && rm -rf build logweir.egg-info \
    && groupadd --gid 10001 logweir \
    && useradd --uid 10001 --gid 10001 --create-home logweir \
    && install --directory --owner 10001 --group 10001 --mode 0750 /data /store
# A number, which an orchestrator can tell from root.
USER 10001:10001
WORKDIR /data
VOLUME /data
# PYTHONSAFEPATH: `python -m` would import a module that lies in /data before one of the image.
ENV LOGWEIR_DATA_DIR=/data PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
ENTRYPOINT ["python", "-m"]
CMD ["pipeline.cli", "--help"]
