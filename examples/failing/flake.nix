# Shows a failure: `broken` prints some lines and exits 1, `dependent` needs it and is therefore never
# tried, and `independent` builds all the same. The evaluation as a whole fails. Only /bin/sh is needed,
# no network.
{
  description = "One package that fails, one that needs it, one that does not";

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
          package = name: attributes: script:
            derivation (
              attributes
              // {
                inherit name system;
                builder = "/bin/sh";
                args = [ "-c" script ];
              }
            );
        in
        rec {
          broken = package "broken" { } ''
            echo "checking for a compiler... yes"
            echo "compiling part 1 of 2"
            echo "compiling part 2 of 2"
            echo "error: part 2 does not compile" >&2
            exit 1
          '';
          dependent = package "dependent" { inherit broken; } ''
            echo "built with $broken" > $out
          '';
          independent = package "independent" { } ''
            echo "independent of the broken package" > $out
          '';
        }
      );
    };
}
