# Four packages whose dependencies form a diamond: `a` is needed by `b` and by `c`, and `d` needs both.
# `b` and `c` can build at the same time, `d` only after them, and `a` is built once. Only /bin/sh is
# needed, no network.
{
  description = "a <- b, c <- d";

  outputs =
    { self }:
    let
      systems = [ "x86_64-linux" "aarch64-linux" "x86_64-darwin" "aarch64-darwin" ];
      forEachSystem = make:
        builtins.listToAttrs (map (system: { name = system; value = make system; }) systems);
    in
    {
      packages = forEachSystem (
        system:
        let
          # A text file with the package's name and, indented, the text of each of its dependencies.
          package = name: dependencies:
            derivation {
              inherit name system dependencies;
              builder = "/bin/sh";
              args = [
                "-c"
                ''
                  echo "building $name"
                  echo "$name" > $out
                  for dependency in $dependencies; do
                    while IFS= read -r line; do echo "  $line" >> $out; done < $dependency
                  done
                ''
              ];
            };
        in
        rec {
          a = package "a" [ ];
          b = package "b" [ a ];
          c = package "c" [ a ];
          d = package "d" [ b c ];
          default = d;
        }
      );
    };
}
