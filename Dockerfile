# One image for every role; docker-compose.yml says which role a container plays.
FROM python:3.11-slim

WORKDIR /opt/logweir
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY pipeline pipeline
COPY config config
# Compiled here: the user of the image may not write there, and each process would compile all that it imports.
RUN pip install --no-cache-dir --constraint constraints.txt '.[all]' \
    && useradd --system --create-home --uid 10001 logweir \
    && mkdir /data && chown logweir /data
USER logweir
WORKDIR /data
VOLUME /data
ENV LOGWEIR_DATA_DIR=/data PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m"]
CMD ["pipeline.cli", "--help"]
