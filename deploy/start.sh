#!/bin/sh
# Start compose.yaml. Create missing files first, and leave existing files unchanged:
#   secrets/               a password for each service, in a folder that only its owner may enter
#   compose.digests.yaml   the current digests of third-party images; remove the file to use newer images
#   .env                   makes every `docker compose` command here read both files
# Arguments are passed to `docker compose up -d`.
# -C: files are written only if they are new, so nothing is written through a link.
set -euC
cd "$(dirname "$0")"

# In .env, a line break would begin another setting, and $ a variable.
case "${REPOSITORY:-}${RUNBOOKS:-}" in
  *[[:cntrl:]]* | *[\"\'\`\$\\\#]*)
    echo "REPOSITORY and RUNBOOKS must not have quotes, line breaks or any of \$ \` \\ #; use other values." >&2
    exit 1
    ;;
esac

mkdir -p secrets
# Containers run as other users, which must be able to read the files. Other users of this machine cannot enter the
# folder.
chmod 700 secrets
umask 022

made() { # FILE: write standard input to FILE unless FILE exists
  if [ -s "secrets/$1" ]; then
    cat >/dev/null
  else
    rm -f "secrets/.$1.part"
    cat >"secrets/.$1.part"
    mv "secrets/.$1.part" "secrets/$1"
  fi
}
password() { # FILE
  value=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
  if [ ${#value} -ne 48 ]; then
    echo "The password for $1 could not be created: od did not read 24 bytes from /dev/urandom; check that device." >&2
    exit 1
  fi
  printf %s "$value" | made "$1"
  # An empty password, or one with a quote, which would end the quotes around it in another file, would open the
  # service.
  case $(cat "secrets/$1") in
    "" | *[!A-Za-z0-9._~-]*)
      echo "secrets/$1 is empty, or has other characters than letters, digits and ._~-; write another password." >&2
      exit 1
      ;;
  esac
}

for name in postgres valkey_password kafka_broker kafka_gateway kafka_control signing_key grafana; do
  password "$name"
done
printf 'postgresql://llmops:%s@postgres/llmops' "$(cat secrets/postgres)" | made store
printf 'redis://:%s@valkey:6379/0' "$(cat secrets/valkey_password)" | made redis
printf 'requirepass %s\n' "$(cat secrets/valkey_password)" | made valkey.conf
plain=org.apache.kafka.common.security.plain.PlainLoginModule
made kafka.jaas <<END
KafkaServer {
  $plain required
  username="broker" password="$(cat secrets/kafka_broker)"
  user_broker="$(cat secrets/kafka_broker)"
  user_gateway="$(cat secrets/kafka_gateway)"
  user_control="$(cat secrets/kafka_control)";
};
END
made kafka_admin.properties <<END
security.protocol=SASL_PLAINTEXT
sasl.mechanism=PLAIN
sasl.jaas.config=$plain required username="broker" password="$(cat secrets/kafka_broker)";
END
# The file is empty until `docker compose run --rm control key create … --scopes metrics > secrets/metrics_key`.
[ -e secrets/metrics_key ] || : >secrets/metrics_key

if [ ! -s compose.digests.yaml ]; then
  others=$(awk '/^  [a-z-]+:$/ { name = substr($1, 1, length($1) - 1) }
    /^    image: / && $NF !~ /^(llmops:|[*])/ { print name, $NF }
    /^    image: [*]/ { print name, "*" }' compose.yaml)
  last=
  rm -f .compose.digests.part
  {
    echo "# Made by start.sh: the images as they were at the first start."
    echo "services:"
    echo "$others" | while read -r name image; do
      # A YAML alias refers to the image of the service before.
      [ "$image" = "*" ] && image=$last
      last=$image
      docker pull --quiet "$image" >/dev/null
      found=$(docker image inspect --format '{{index .RepoDigests 0}}' "$image")
      case $found in
        *@sha256:?*) printf '  %s: {image: "%s"}\n' "$name" "$found" ;;
        *)
          echo "Docker has no digest of $image, because the image did not come from a registry; pull it from one." >&2
          exit 1
          ;;
      esac
    done
  } >.compose.digests.part
  mv .compose.digests.part compose.digests.yaml
fi
if [ ! -s .env ]; then
  rm -f .env.part
  {
    echo "COMPOSE_FILE=compose.yaml:compose.digests.yaml"
    [ -z "${REPOSITORY:-}" ] || echo "REPOSITORY=$REPOSITORY"
    [ -z "${RUNBOOKS:-}" ] || echo "RUNBOOKS=$RUNBOOKS"
  } >.env.part
  mv .env.part .env
fi
exec docker compose up -d "$@"
