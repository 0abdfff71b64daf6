# The server of qwenimg in a container: for a CPU, or with --build-arg BACKEND=cuda for an NVIDIA card.
#
#   docker build -t qwenimg .
#   docker run --rm -p 127.0.0.1:7860:7860 -v qwenimg:/data qwenimg
#
# Models, pictures, the server's token and settings are in /data. docs/server.md has the rest.
FROM python:3.12-slim

ARG BACKEND=cpu
RUN useradd --create-home --uid 1000 qwenimg \
 && mkdir /data && chown qwenimg /data \
 && if [ "$BACKEND" = cpu ]; then \
      pip install --no-cache-dir uv && uv pip install --system --no-cache --torch-backend=cpu torch; \
    else \
      pip install --no-cache-dir torch; \
    fi

COPY . /tmp/qwenimg
RUN pip install --no-cache-dir '/tmp/qwenimg[torch,serve]' && rm -r /tmp/qwenimg

USER qwenimg
WORKDIR /data
ENV HF_HOME=/data/huggingface XDG_CACHE_HOME=/data/cache XDG_CONFIG_HOME=/data/config XDG_DATA_HOME=/data/share
VOLUME /data
EXPOSE 7860

# Outside of the container others may reach the port, so the server has a token, made at the first start.
ENV MODEL=shapes
CMD ["sh", "-c", "test -s token.txt || (umask 077; python -c 'import secrets; print(secrets.token_urlsafe(24))' > token.txt); echo \"token: $(cat token.txt)\" >&2; exec qwenimg serve --model \"$MODEL\" --host 0.0.0.0 --token-file token.txt --output gallery"]
