# modelhost in a container.
#
#   docker build -t modelhost .
#   docker run --rm -v modelhost-data:/var/lib/modelhost -v modelhost-run:/run/modelhost \
#              --ulimit memlock=-1 modelhost
#
# Clients mount the *directory* /run/modelhost (not a socket file: a restart makes a new one).
FROM debian:bookworm-slim AS build
WORKDIR /src
COPY deploy/install-deps deploy/install-deps
RUN deploy/install-deps --build && rm -rf /var/lib/apt/lists/*
COPY . .
RUN cmake --preset release -DMODELHOST_TESTS=OFF -DMODELHOST_PYTHON=OFF -DCMAKE_INSTALL_PREFIX=/usr \
 && cmake --build --preset release \
 && DESTDIR=/out cmake --install build/release --strip \
 && rm -rf /out/usr/include /out/usr/lib/systemd

FROM debian:bookworm-slim
# The shared libraries that the two programs name, and nothing else.
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      libabsl20220623 libgrpc29 libgrpc++1.51 libprotobuf32 libspdlog1.10 libssl3 libsystemd0 \
      libprometheus-cpp-core1.0 libprometheus-cpp-pull1.0 libsimdjson14 libtomlplusplus3 libre2-9 zlib1g \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --system --gid 970 modelhost \
 && groupadd --system --gid 971 modelhost-admin \
 && useradd --system --uid 970 --gid modelhost --no-create-home --home-dir /var/lib/modelhost \
      --shell /usr/sbin/nologin modelhost \
 && install -d -m 0700 -o modelhost -g modelhost /var/lib/modelhost /var/lib/modelhost/store \
      /var/lib/modelhost/state \
 && install -d -m 0755 -o modelhost -g modelhost /run/modelhost
COPY --from=build /out/ /
USER modelhost
VOLUME ["/var/lib/modelhost", "/run/modelhost"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
  CMD ["modelctl", "--runtime-dir", "/run/modelhost", "health", "-q"]
# The port is for the loopback of the container's own network; see docs/operations.md to scrape it.
ENTRYPOINT ["modelhostd", "--config", "/etc/modelhost/modelhostd.toml", \
            "--store", "/var/lib/modelhost/store", "--state", "/var/lib/modelhost/state", \
            "--runtime-dir", "/run/modelhost"]
