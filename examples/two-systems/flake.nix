# The same package for two systems: x86_64-linux, and riscv64-linux, for which hardly anybody has a worker.
# The first one builds; the second one waits, and the reason says for what. Only /bin/sh is needed, no
# network.
{
  description = "One package, two systems";

  outputs =
    { self }:
    let
      systems = [ "x86_64-linux" "riscv64-linux" ];
      forEachSystem = make:
        builtins.listToAttrs (map (system: { name = system; value = make system; }) systems);
    in
    {
      packages = forEachSystem (system: rec {
        native = derivation {
          name = "native-${system}";
          inherit system;
          builder = "/bin/sh";
          args = [ "-c" "echo \"built on ${system}\" > $out" ];
        };
        default = native;
      });
    };
}
