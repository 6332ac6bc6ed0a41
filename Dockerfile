# One image with the three binaries. Which one runs is the command:
#   docker run … taskrelay relay | worker | taskrelay …
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
ARG VERSION=dev
# Static: the image below has no C library.
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /out/ ./cmd/...

# Nothing but the binaries and the certificates that HTTPS targets are checked with.
FROM scratch
LABEL org.opencontainers.image.title="taskrelay" \
      org.opencontainers.image.description="Transactional outbox relay and workers on Postgres and NATS JetStream" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/ /usr/local/bin/
ENV PATH=/usr/local/bin
# By number, so that Kubernetes can see that it is not root.
USER 65532:65532
CMD ["taskrelay", "--help"]
