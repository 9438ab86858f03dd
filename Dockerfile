FROM python:3.11-slim
# Extras of pyproject.toml: EXTRAS=validate adds PyTorch, for CPUs unless another index is given.
ARG EXTRAS=""
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints-test.txt ./
COPY meshwright meshwright
RUN python -m pip install --no-cache-dir --disable-pip-version-check \
        ${EXTRAS:+--extra-index-url="$TORCH_INDEX"} --constraint constraints-test.txt \
        ".${EXTRAS:+[$EXTRAS]}" \
    && useradd --create-home --uid 1000 meshwright \
    && install --directory --mode 1777 /var/cache/matplotlib
USER 1000
# The folder of the caller is mounted here; with --user there is no home to cache fonts in.
WORKDIR /work
ENV MPLCONFIGDIR=/var/cache/matplotlib
ENTRYPOINT ["meshwright"]
CMD ["--help"]
