# Sourced by recipes.sh and e2e.sh.
size_of() { # size_of MODEL: small (up to 1.5 B parameters) or large (7 B, 8 B), by the name of the model
    case "$(basename "$1" | tr '[:upper:]' '[:lower:]')" in
        *125m* | *350m* | *0.5b* | *-1b* | *1.3b* | *1.5b*) echo small ;;
        [78]b* | *[!0-9.x][78]b*) echo large ;; # not 1.7b, 57b or 8x7b
        *) echo "error: the name $1 does not show the size of the model: set SIZE (e2e.sh: ACTOR_SIZE, REWARD_SIZE) to small (up to 1.5 B) or large" >&2 && return 2 ;;
    esac
}
